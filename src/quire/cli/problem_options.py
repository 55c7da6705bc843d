"""The options that describe a machine and a layer, and the problem that they mean: `explain` and `warm` have them."""

from __future__ import annotations

from typing import Any

import click
import torch

from quire.cache.format import FORMATS, dtype_name
from quire.cache.groups import LAYOUTS_OF_GROUPS, SWIZZLE
from quire.cache.kv_cache import MOST_LATENT
from quire.cache.latent_rows import ROTATED
from quire.cache.layout import LAYOUTS
from quire.cli.command import Args, ChoiceOf, Count, Number, OneOfNames, Option, Whole, flag
from quire.errors import ArgumentError
from quire.options import FEATURES, NUMBERS, Options
from quire.platform import NAMED, NICKNAMES, Platform
from quire.prepare import SELECTIONS
from quire.problem import Problem
from quire.rope import WEIGHTS, Rope

Q_TYPES = tuple(name for name, format in FORMATS.items() if format.dtype.is_floating_point)
"""The types that queries and outputs can have."""
_WORDS = {"float": "fp32", "half": "fp16"}
SPELLINGS = {
    **{word: name for word, name in _WORDS.items() if name in FORMATS},
    **{str(format.dtype).removeprefix("torch."): name for name, format in FORMATS.items() if format.uniform},
    **{f"fp8_{name}": name for name in Q_TYPES if FORMATS[name].itemsize == 1},
}
"""Other spellings of a type. fp8 alone is not among them: it means the platform's own."""


NORMS = {dtype_name(dtype): dtype for dtype in WEIGHTS}
"""The types of weights of a norm."""
_OPTIONAL_DIM: dict[str, Any] = {"is_flag": False, "flag_value": "0", "type": Whole(0), "metavar": "[DIM]"}


def problem_options() -> list[click.Parameter]:
    """The options that describe a machine and a layer."""
    machine, layer = "the machine", "the layer"
    found: list[click.Parameter] = [
        Option(
            "--arch",
            metavar="NAME",
            type=OneOfNames(lambda: (*NAMED, *NICKNAMES)),
            group=machine,
            help=f"another machine: {', '.join(NAMED)}; or a GPU's name, such as {', '.join(list(NICKNAMES)[:12])} (this machine)",
        ),
        Option("--q-heads", type=Count, default=32, group=layer, help="query heads (32)"),
        Option("--kv-heads", type=Count, default=8, group=layer, help="key and value heads (8)"),
        Option("--head-dim", type=Count, default=128, group=layer, help="size of a head (128)"),
        Option("--v-head-dim", type=Count, group=layer, help="size of a value head, if it differs"),
        Option("--v-in-k", type=Count, group=layer, help="values are the first so many elements of keys (latent attention)"),
        Option("--page-size", type=Count, default=16, group=layer, help="tokens in a page (16)"),
        *_cache_types(layer),
        Option(
            "--q-dtype", default="bf16", metavar="TYPE", type=OneOfNames(lambda: Q_TYPES), group=layer, help="the type of q (bf16)"
        ),
        Option(
            "--out-dtype",
            default="auto",
            metavar="TYPE",
            type=OneOfNames(lambda: ("auto", *Q_TYPES)),
            group=layer,
            help="the type of the output (auto: as q; bf16 for fp8 q)",
        ),
        Option(
            "--scales",
            type=ChoiceOf(("tensor", "head", "token")),
            default="tensor",
            group=layer,
            help="what one scale of a quantised cache covers (tensor)",
        ),
        Option("--layout", type=ChoiceOf(LAYOUTS), default="nhd", group=layer, help="the order of axes in a page (nhd)"),
        Option(
            "--form",
            type=ChoiceOf(("full", "context")),
            default="full",
            group=layer,
            help="context: new tokens are not cached yet (full)",
        ),
        Option(
            "--window",
            "--sliding-window",
            type=Whole(),
            default=0,
            group=layer,
            help="visible keys, the query's own included (0: all)",
        ),
    ]
    return [*found, *_feature_options(layer)]


def _cache_types(layer: str) -> list[click.Parameter]:
    """How K and V are stored."""
    return [
        Option(
            "--kv-dtype",
            default="auto",
            metavar="TYPE",
            type=OneOfNames(lambda: ("auto", "fp8", *FORMATS)),
            group=layer,
            help=f"how the cache stores an element: auto (as q), fp8 (the machine's own), {', '.join(FORMATS)}",
        ),
        Option(
            "--v-dtype",
            metavar="TYPE",
            type=OneOfNames(lambda: ("fp8", *FORMATS)),
            group=layer,
            help="how it stores an element of V, if it is not as K",
        ),
    ]


def _feature_options(layer: str) -> list[click.Parameter]:
    """An option for each feature of a layer."""
    found: list[click.Parameter] = []
    for name in FEATURES:
        words = f"--{name.replace('_', '-')}"
        if name in NUMBERS:
            value = {"is_flag": False, "flag_value": "1", "type": Number(), "metavar": "[NUMBER]"}
            found.append(Option(words, group=layer, help=f"the layer has Options({name}=NUMBER)", **value))
        else:
            found.append(flag(words, f"the layer has Options({name}=...)", layer))
    found.append(flag("--spans", "each new token sees the keys of its Batch(spans=...)", layer))
    found.append(Option("--select", type=ChoiceOf(SELECTIONS), group=layer, help="queries see the keys of Batch(select=...) alone"))
    found.append(
        Option("--rope", group=layer, help="writes rotate the first so many elements of q and k (all)", **_OPTIONAL_DIM),
    )
    found.append(flag("--rope-interleaved", "with --rope: neighbours are rotated, as in GPT-J", layer))
    norm = "with --rope: q and k have a norm (with --v-in-k, the latent); its weights' type"
    found.append(Option("--qk-norm", type=ChoiceOf(NORMS), group=layer, help=norm))
    found.append(flag("--lse", "the log-sum-exp is returned, too", layer))
    found.append(flag("--non-causal", "queries also see later keys", layer))
    return found


def platform_of(args: Args) -> Platform:
    """The machine of `--arch`; this machine by default."""
    try:
        return Platform.named(args.arch) if args.arch else Platform.detect()
    except ArgumentError as error:
        raise ArgumentError("--arch", error.given, error.allowed) from None


def problem_of(args: Args, platform: Platform) -> Problem:
    """The problem that the options describe."""
    if args.q_heads % args.kv_heads:
        raise ArgumentError("--q-heads", args.q_heads, f"a multiple of --kv-heads {args.kv_heads}")
    if args.window < 0:
        raise ArgumentError("--window", args.window, "0 for no window, or the number of visible keys")
    _check_features(args)
    _check_v_in_k(args)
    q_dtype = type_of("--q-dtype", args.q_dtype, Q_TYPES, platform)
    own = default_out_type(q_dtype)
    out_dtype = type_of("--out-dtype", args.out_dtype, Q_TYPES, platform, auto=own)
    format, v_format = _formats(args, platform, q_dtype)
    side = args.window - 1 if args.window else None
    features: dict[str, Any] = {name: getattr(args, name) not in (None, False) for name in FEATURES}
    return Problem(
        q_heads=args.q_heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        page_size=args.page_size,
        v_head_dim=args.v_in_k or args.v_head_dim or 0,
        v_in_k=bool(args.v_in_k),
        q_dtype=q_dtype,
        out_dtype=out_dtype,
        format=format,
        v_format=v_format,
        layout=args.layout,
        scales=args.scales if FORMATS[format].scaled or FORMATS[v_format].scaled else "none",
        form=args.form,
        causal="no" if args.non_causal else "yes",
        window=(side, side),
        lse=args.lse,
        spans="int32" if args.spans else "none",
        select=args.select or "none",
        device="cpu" if platform.vendor == "cpu" else "cuda",
        **features,
    )


def _check_features(args: Args) -> None:
    """Refuses values of options, and options that exclude each other."""
    for name in NUMBERS:
        try:
            Options(**{name: getattr(args, name)})
        except ArgumentError as error:
            raise ArgumentError(f"--{name}", error.given, error.allowed) from None
    if args.spans and (args.window or args.non_causal or args.mask):
        raise ArgumentError("--spans", "with --window, --non-causal or --mask", "alone: spans say what each token sees")
    if args.select and (args.spans or args.mask or args.form == "context"):
        raise ArgumentError("--select", "with --spans, --mask or --form context", "full form, without them")


def rope_of(args: Args) -> Rope | None:
    """How writes rotate, as `--rope` says, with tables and weights without memory."""
    if args.rope is None:
        for word, given in (("--rope-interleaved", args.rope_interleaved), ("--qk-norm", args.qk_norm)):
            if given:
                raise ArgumentError(word, "without --rope", "with --rope")
        return None
    behind = args.head_dim - (args.v_in_k or 0)
    dim = args.rope or behind
    if dim % 2 or not 0 < dim <= behind:
        most = f"--head-dim - --v-in-k = {behind}" if args.v_in_k else f"--head-dim {behind}"
        raise ArgumentError("--rope", dim, f"an even number of at most {most}")
    weight = torch.empty(args.v_in_k or args.head_dim, dtype=NORMS[args.qk_norm], device="meta") if args.qk_norm else None
    how: dict[str, Any] = {"interleaved": args.rope_interleaved, "q_norm": None if args.v_in_k else weight, "k_norm": weight}
    return Rope.make(behind, max_positions=1, rotary_dim=dim, device="meta", **how)


def _check_v_in_k(args: Args) -> None:
    """Refuses sizes and options that a cache with `v_in_k` cannot have."""
    if not args.v_in_k:
        return
    for word, given in (("--v-head-dim", args.v_head_dim), ("--v-dtype", args.v_dtype)):
        if given:
            raise ArgumentError(word, f"{given} with --v-in-k", "nothing: values are a part of the keys")
    if args.layout not in ("nhd", "hnd"):
        raise ArgumentError("--layout", f"{args.layout} with --v-in-k", "nhd or hnd")
    if not args.v_in_k <= args.head_dim <= MOST_LATENT:
        allowed = f"at most --head-dim, which is at most {MOST_LATENT}"
        raise ArgumentError("--v-in-k", f"{args.v_in_k} with --head-dim {args.head_dim}", allowed)


def _formats(args: Args, platform: Platform, q_dtype: str) -> tuple[str, str]:
    """The formats of K and V."""
    format = type_of("--kv-dtype", args.kv_dtype, tuple(FORMATS), platform, auto=q_dtype)
    v_format = type_of("--v-dtype", args.v_dtype or format, tuple(FORMATS), platform)
    for name in (format, v_format):
        if args.batch_invariant and args.form == "context" and FORMATS[name].quantised:
            raise ArgumentError("--form", "context with --batch-invariant", f"full: over {name} the forms differ by a rounding")
    of_v = ("--v-in-k", args.v_in_k, v_format) if args.v_in_k else ("--v-head-dim", args.v_head_dim or args.head_dim, v_format)
    for word, dim, name in (("--head-dim", args.head_dim, format), of_v):
        latent, rest = FORMATS[name].latent, FORMATS[name].latent + ROTATED
        if latent and (args.v_in_k, args.head_dim) != (latent, rest):
            given = f"{name} with --head-dim {args.head_dim} and --v-in-k {args.v_in_k}"
            raise ArgumentError("--kv-dtype", given, f"it with --head-dim {rest} and --v-in-k {latent}, as --like deepseek-v3")
        _check_scales(args, name)
        if dim % FORMATS[name].unit:
            raise ArgumentError(word, dim, f"a multiple of {FORMATS[name].unit}, as {name} requires")
        if FORMATS[name].group and args.layout not in LAYOUTS_OF_GROUPS:
            raise ArgumentError("--layout", args.layout, f"{' or '.join(LAYOUTS_OF_GROUPS)}, as {name} requires")
        if FORMATS[name].swizzled and args.page_size % SWIZZLE:
            raise ArgumentError("--page-size", args.page_size, f"a multiple of {SWIZZLE}, as {name} requires")
    return format, v_format


def _check_scales(args: Args, name: str) -> None:
    """Refuses scales that a format cannot have."""
    if (FORMATS[name].group or FORMATS[name].zero_point) and args.v_in_k:
        raise ArgumentError("--kv-dtype", name, "with --v-in-k a format without scales of groups or zero points")
    if FORMATS[name].zero_point and args.scales != "token":
        raise ArgumentError("--scales", args.scales, f"token, as {name} requires")


def default_out_type(q_dtype: str) -> str:
    """The default type of the output."""
    return "bf16" if FORMATS[q_dtype].itemsize == 1 else q_dtype


def own_fp8(platform: Platform) -> str:
    """What fp8 means on a platform: the format that its hardware supports; otherwise the most common one."""
    return platform.fp8 or next(name for name in Q_TYPES if FORMATS[name].itemsize == 1)


def type_of(name: str, given: str, allowed: tuple[str, ...], platform: Platform, auto: str | None = None) -> str:
    """Quire's name of a type, from any of its spellings."""
    own = own_fp8(platform)
    known = {"auto": auto} if auto else {}
    known |= {word: word for word in allowed}
    # vLLM does not say how special values are encoded: that depends on the machine, too.
    generic = {"fp8": own, f"fp8_{own[:4]}": own}
    known |= {word: meant for word, meant in {**SPELLINGS, **generic}.items() if meant in allowed}
    word = given.removeprefix("torch.").lower()
    if word not in known:
        raise ArgumentError(name, repr(given), ", ".join(known))
    return known[word]
