"""Faulty kernels that were written without knowledge of the kit's catalogue: a paged attention in plain torch (tiles, online softmax,
splits) with one fault each. `FAULTS` describes them; `quire conform tests/conformance/unseen/independent.py:NAME` tests one."""

# ruff: noqa: B023, E501, E741, RUF005, RUF007

from __future__ import annotations

import math
from functools import wraps

import torch

TILE, SPLIT = 64, 256
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2, "int8": torch.int8}
STATE = {}

FAULTS = {
    "ok": "nothing",
    # pages, indices
    "tail_page_empty": "valid tokens of the last page = kv_len % page_size: if 0, the last page is lost",
    "page_i16": "page ids stored as int16 (wrap above 32767)",
    "offset_u32": "page * stride wrapped to 32 bits, unsigned",
    "table_by_hint": "row of the table has cdiv(max_kv_len, page_size) entries, flat index",
    "page_shift": "page = key >> log2(page_size), slot = key & (2^n-1): wrong at 24",
    "cascade": "if sequences 0 and 1 share first pages, all sequences are taken to share them",
    "lens_as_i32": "int64 kv_lens read as int32 words",
    # heads
    "gqa_pow2": "kv head = h // next_pow2(group)",
    "group_tile8": "group > 8: heads 8.. of a group get the query of head h-8",
    "pos_pow2_group": "causal position of row = row // next_pow2(group) instead of // group when the pack of rows (16) is used (q_len > 1)",
    "alibi_mod_group": "slope of head h % group",
    # masks
    "last_tile_floor": "number of key tiles = cdiv(kv_len - 1, 64): key 64n lost when kv_len = 64n + 1",
    "window_ctx_block": "context form: window bound of cached keys relative to first new token for every row",
    "window_right_lt": "right side of a window: distance < right",
    "window_tile_up": "first tile of a window rounded up: partial tile on the left lost",
    "tree_row_stride": "mask row stride = q_len instead of the number of columns",
    "tree_window_linear": "with a tree, window uses the index, not the position",
    "neg_inf_tile": "a tile with no visible key for a row: exp(-inf + inf) = NaN",
    "noncausal_mask_tile": "non-causal: keys of the last partial tile of 64 visible only up to the query's own position",
    # logits
    "softcap_before_scale": "softcap on q k, then the scale",
    "softcap_after_mask": "mask, then softcap: hidden keys have logit -cap",
    "alibi_before_softcap": "ALiBi inside softcap",
    "alibi_ctx_abs": "context form: distance to new keys computed with the key's index in new (too large by ctx)",
    "sink_per_split": "sink counted in each split",
    "sink_base2": "sink not multiplied by log2(e) in a base-2 kernel",
    "kscale_after_softcap": "k_scale applied after softcap",
    "scale_default": "scale argument ignored: head_dim ** -0.5",
    # softmax, splits
    "four_splits": "only first 4 splits merged",
    "merge_no_rescale": "partial sums of splits added without exp(m_i - m)",
    "acc_not_rescaled": "acc not rescaled when max grows, sum is",
    "lazy_rescale": "rescale skipped if max grows by < 8 (log2), though weights use the new max",
    "max_init_0": "running max starts at 0",
    "split_floor": "keys per split = kv_len // n (remainder lost), n = cdiv(kv_len, 256)",
    "p_fp8": "fp8 cache: weights rounded to e4m3 before PV",
    "acc_fp16_256": "head_dim >= 256: acc in fp16",
    # lse
    "lse_no_sink": "LSE without the sink",
    "lse_last_split": "LSE of last split only",
    "lse_scaled_softcap": "LSE in base 2 if softcap, natural otherwise",
    # scales
    "v_uses_k_head": "V scale is K's if per head",
    "token_scale_page": "token scale of pages >= 1 read from the previous page of the table",
    "token_scale_hnd": "token scales read as [page, head, slot]",
    "scale_new": "context form: new tokens multiplied with scales too",
    # rows and sequences
    "empty_shift": "page table row counted without the empty sequences before it",
    "padding_zero": "padding rows zeroed",
    "seqs_128": "sequences from 128 on use the length of sequence 127",
    "no_keys_skip": "sequence without keys: rows not written",
    "plan_cached": "kv_lens cached by shape of the batch from the first call",
    "random_merge": "splits merged in random order",
    "split_by_batch": "split size depends on the number of sequences",
    "q_dense": "q assumed to be dense",
    "newv_stride_of_k": "new_v addressed with the token stride of new_k",
    "hint_trusted": "keys beyond max_kv_len ignored",
    "hint_rows": "rows beyond max_q_len rounded up to 16 not computed",
    "nan_v_tail": "values of the rest of the last page loaded with weight 0",
    "dim_tail": "head_dim no power of two: q and k dims read beyond the head",
    # second lot
    "scale_ignored_softcap": "with softcap the caller's scale is ignored (head_dim ** -0.5)",
    "cascade_nowindow": "as cascade, only without a window and only where the first pages of 0 and 1 are the same",
    "merge_no_rescale2": "several splits: partial sums added without exp(m_i - m); one split is right",
    "group_gt16": "group > 16: heads from 16 on of a group are those of h - 16 (query)",
    "slot_7bit": "slot & 127: pages of more than 128 slots",
    "neg_scale_abs": "abs(scale)",
    "alibi_split_local": "ALiBi distance from the second split on relative to the start of the split",
    "tree_bits_64": "tree mask as 64 bits: new tokens from 64 on never visible but to themselves",
    "kv_head_scale_mod": "k_scale per head: head 0's for all, with groups > 1",
    # two at once
    "two_window_lse": "window one too wide AND LSE in base 2",
    "two_softcap_gqa": "softcap ignored AND interleaved kv heads",
    "two_split_sink": "sink per split AND v scale of k per head",
}


def pow2(n):
    return 1 << (n - 1).bit_length()


def gather(x, layout, is_v, pages, slots):
    if layout == "nhd":
        return x[pages, slots]
    if layout in ("hnd", "vllm_joint"):
        return x[pages, :, slots]
    if not is_v:
        return x[pages, :, :, slots].flatten(2)
    if layout == "vllm_x":
        return x[pages, :, :, slots]
    n = x.shape[-1]
    return x[pages, :, slots // n, :, slots % n]


def attention(
    F,
    *,
    q,
    k_pages,
    v_pages,
    page_table,
    kv_lens,
    q_starts,
    out,
    scale,
    window,
    softcap,
    alibi,
    sinks,
    causal,
    mask,
    positions,
    q_scale,
    batch_invariant,
    k_scale,
    v_scale,
    new_k,
    new_v,
    lse,
    layout,
    format,
    max_q_len,
    max_kv_len,
):
    tokens, H, D = q.shape
    if layout == "nhd":
        ps, KH = k_pages.shape[1:3]
    elif layout in ("hnd", "vllm_joint"):
        KH, ps = k_pages.shape[1:3]
    else:
        KH, ps = k_pages.shape[1], k_pages.shape[3]
    VD, G = out.shape[2], H // KH
    if F == "scale_default" or (F == "scale_ignored_softcap" and softcap is not None):
        scale = D**-0.5
    if F == "lens_as_i32" and kv_lens.dtype == torch.int64:
        kv_lens = kv_lens.contiguous().view(torch.int32)[: len(kv_lens)]
    if F == "neg_scale_abs":
        scale = abs(scale)
    starts, lens = q_starts.tolist(), kv_lens.tolist()
    seqs = len(starts) - 1
    if F == "plan_cached":
        key = (seqs, tokens, H, D, ps, max_kv_len)
        lens = STATE.setdefault(key, lens)
    qq = q
    if F == "q_dense" and not q.is_contiguous():
        qq = torch.as_strided(q, (tokens, H, D), (H * D, D, 1))
    if F == "newv_stride_of_k" and new_v is not None:
        st = new_k.stride()[0]
        last = (new_v.shape[0] - 1) * st + (KH - 1) * new_v.stride(1) + VD
        room = new_v.untyped_storage().size() // new_v.element_size() - new_v.storage_offset()
        if last <= room:
            new_v = torch.as_strided(new_v, new_v.shape, (st, new_v.stride(1), new_v.stride(2)))
        else:
            idx = (torch.arange(new_v.shape[0]) * st // max(1, new_v.stride(0))).clamp(max=new_v.shape[0] - 1)
            new_v = new_v[idx]
    head = torch.arange(H)
    kvh = head // G
    if F == "gqa_pow2":
        kvh = head // pow2(G)
    if F == "two_softcap_gqa":
        kvh = head % KH
        softcap = None
    if F == "group_tile8" and G > 8:
        src = torch.where(head % G >= 8, head - 8, head)
    elif F == "group_gt16" and G > 16:
        src = torch.where(head % G >= 16, head - 16, head)
    else:
        src = head
    slopes = None if alibi is None else alibi.float()
    if F == "alibi_mod_group" and slopes is not None:
        slopes = slopes[head % G]
    snk = None if sinks is None else sinks.float()
    if F == "sink_base2" and snk is not None:
        snk = snk * math.log(2)
    left, right = window
    if F == "two_window_lse" and left is not None:
        left += 1
    if F in ("v_uses_k_head", "two_split_sink") and k_scale is not None and k_scale.dim() == 1:
        v_scale = k_scale
    shared = 0
    if F.startswith("cascade") and (F == "cascade" or window == (None, None)) and seqs > 1 and lens[0] and lens[1]:
        n = min((lens[0] - 1) // ps, (lens[1] - 1) // ps, page_table.shape[1])
        while shared < n and page_table[0, shared] == page_table[1, shared] and page_table[0, shared] >= 0:
            shared += 1
    if F == "padding_zero":
        out[starts[-1] :] = 0
    empties = 0
    for s in range(seqs):
        a, b = starts[s], starts[s + 1]
        n = b - a
        if n == 0:
            empties += 1
            continue
        kv = lens[s]
        if F == "seqs_128" and s >= 128:
            kv = max(lens[127], n)
        if F == "hint_trusted" and max_kv_len is not None:
            kv_cut = min(kv, max_kv_len)
        else:
            kv_cut = kv
        if F == "no_keys_skip" and kv == 0:
            continue
        ctx = kv - n
        row = max(0, s - empties) if F == "empty_shift" else s
        at = torch.arange(ctx, kv)
        k_at = torch.arange(kv)
        linear = at[:, None] - k_at
        if positions is not None:
            at = positions[a:b].long()
            k_at = torch.cat((k_at[:ctx], at))
        dist = at[:, None] - k_at
        vis = torch.ones(n, kv, dtype=torch.bool)
        wd = linear if F == "tree_window_linear" else dist
        if left is not None:
            lw = wd <= left
            if F == "window_ctx_block" and new_k is not None:
                lw = torch.cat(((ctx - k_at[None, :ctx] <= left).expand(n, ctx), lw[:, ctx:]), 1)
            vis &= lw
        is_causal = bool(causal[s]) if isinstance(causal, torch.Tensor) else causal
        if mask is not None:
            m = mask[a:b, :n]
            if F == "tree_row_stride":
                flat = mask[a:b].reshape(-1)
                m = flat[torch.arange(n)[:, None] * n + torch.arange(n)]
            if F == "tree_bits_64":
                m = m & ((torch.arange(n) < 64) | torch.eye(n, dtype=torch.bool))
            vis[:, ctx:] &= m
        elif is_causal:
            cd = linear
            if F == "pos_pow2_group" and n > 1:
                r = torch.arange(n)
                cd = (ctx + r * G // pow2(G))[:, None] - torch.arange(kv)
            vis &= cd >= 0
        elif F == "noncausal_mask_tile" and kv % TILE:
            vis &= (linear >= 0) | (torch.arange(kv) < kv // TILE * TILE)
        if right is not None:
            vis &= (wd > -right) if F == "window_right_lt" else (wd >= -right)
        if F == "tail_page_empty":
            tail = kv % ps
            if new_k is None and tail == 0:
                vis[:, max(kv - ps, 0) :] = False
            elif new_k is not None and ctx % ps == 0 and ctx:
                vis[:, ctx - ps : ctx] = False
        if F == "last_tile_floor" and kv:
            vis[:, -(-(kv - 1) // TILE) * TILE :] = False
        if kv_cut < kv:
            vis[:, kv_cut:] = False
        seen = vis.any(0)
        lo = int(seen.nonzero()[0]) if seen.any() else 0
        hi = int(seen.nonzero()[-1]) + 1 if seen.any() else 0
        if F == "window_tile_up" and left is not None and lo > 0:
            first = -(-lo // TILE) * TILE
            if first < hi:
                vis[:, :first] = False
                seen = vis.any(0)
                lo = first
        # Load keys and values lo..hi
        cached = ctx if new_k is not None else kv
        idx = torch.arange(lo, min(hi, cached)) if lo < cached else torch.arange(0)
        idx = idx[seen[idx]]
        K, V = torch.zeros(kv, KH, D), torch.zeros(kv, KH, VD)
        if len(idx):
            if F == "page_shift":
                sh = ps.bit_length() - 1
                pi, slot = idx >> sh, idx & ((1 << sh) - 1)
                pi = pi.clamp(max=page_table.shape[1] - 1)
            else:
                pi, slot = idx // ps, idx % ps
            if F == "table_by_hint":
                width = -(-max(max_kv_len or max(lens), 1) // ps)
                flat = page_table.reshape(-1)
                pages = flat[(row * width + pi).clamp(max=len(flat) - 1)].long()
                pages = pages.clamp(0, k_pages.shape[0] - 1)
            else:
                pages = page_table[row, pi].long()
                if shared:
                    pages = torch.where(pi < shared, page_table[0, pi.clamp(max=shared - 1)].long(), pages)
                if F in ("empty_shift", "seqs_128", "page_shift", "plan_cached", "lens_as_i32"):
                    pages = pages.clamp(0, k_pages.shape[0] - 1)
            if F == "page_i16":
                pages = ((pages + 32768) % 65536 - 32768) % k_pages.shape[0]
            if F == "slot_7bit":
                slot = slot & 127
            kp = vp = pages
            if F == "offset_u32":
                kp = (pages * k_pages.stride(0)) % 2**32 // k_pages.stride(0)
                vp = (pages * v_pages.stride(0)) % 2**32 // v_pages.stride(0)
            kx, vx = gather(k_pages, layout, False, kp, slot), gather(v_pages, layout, True, vp, slot)
            if kx.dtype == torch.uint8:
                kx, vx = kx.contiguous().view(FP8[format]), vx.contiguous().view(FP8[format])
            kx, vx = kx.float(), vx.float()
            sp, ss = pages, slot
            if F == "token_scale_page":
                sp = torch.where(pi >= 1, page_table[row, (pi - 1).clamp(min=0)].long().clamp(0, k_pages.shape[0] - 1), pages)
            if k_scale is not None:

                def sc(t):
                    if t.dim() == 3:
                        if F == "token_scale_hnd":
                            flat = t.reshape(t.shape[0], -1)
                            return flat[sp[:, None], torch.arange(KH) * ps + ss[:, None]][..., None]
                        return t[sp, ss][..., None]
                    return t[:, None] if t.dim() == 1 else t

                if F == "kscale_after_softcap" and softcap is not None:
                    pass
                else:
                    if F == "kv_head_scale_mod" and k_scale.dim() == 1 and G > 1:
                        kx = kx * k_scale[0]
                    else:
                        kx = kx * sc(k_scale)
                vx = vx * sc(v_scale)
            K[idx], V[idx] = kx, vx
        if new_k is not None and hi > ctx:
            j = torch.arange(max(lo, ctx), hi)
            j = j[seen[j]]
            kx, vx = new_k[a:b][j - ctx].float(), new_v[a:b][j - ctx].float()
            if F == "scale_new" and k_scale is not None and k_scale.dim() < 2:
                kx = kx * (k_scale[:, None] if k_scale.dim() else k_scale)
                vx = vx * (v_scale[:, None] if v_scale.dim() else v_scale)
            K[j], V[j] = kx, vx
        nan_tail = None
        if F == "nan_v_tail" and new_k is None and kv % ps and kv:
            rest = torch.arange(kv % ps, ps)
            nan_tail = gather(v_pages, layout, True, page_table[s, (kv - 1) // ps].long().expand(len(rest)), rest)
            if nan_tail.dtype == torch.uint8:
                nan_tail = nan_tail.contiguous().view(FP8[format])
            nan_tail = (nan_tail.float() * 0).sum(0)[kvh]
        Q = qq[a:b].float()[:, src]
        if q_scale is not None:
            Q = Q * q_scale
        if F == "dim_tail" and D & (D - 1):
            extra = pow2(D) - D
            K = torch.cat((K, K.roll(-1, 1)[..., :extra]), -1)
            Q = torch.cat((Q, Q.roll(-1, 1)[..., :extra]), -1)
        Q = Q.transpose(0, 1)  # H n D
        parts = []
        split = SPLIT
        if F == "split_by_batch":
            split = 256 if seqs > 1 else 128
        bounds = list(range(0, hi, split)) + [hi]
        if F == "split_floor" and hi > split:
            c = -(-hi // split)
            bounds = [i * (hi // c) for i in range(c + 1)]
        for i, (p0, p1) in enumerate(zip(bounds, bounds[1:])):
            if p1 <= lo:
                continue
            if F == "four_splits" and i >= 4:
                continue
            mx = torch.full((H, n), 0.0 if F == "max_init_0" else -math.inf)
            l = torch.zeros(H, n)
            acc = torch.zeros(H, n, VD)
            for t0 in range(p0, p1, TILE):
                t1 = min(t0 + TILE, p1)
                if t1 <= lo:
                    continue
                k, v = K[t0:t1][:, kvh].transpose(0, 1), V[t0:t1][:, kvh].transpose(0, 1)
                x = Q @ k.transpose(1, 2)
                vt = vis[:, t0:t1]
                if F == "softcap_before_scale" and softcap is not None:
                    x = softcap * torch.tanh(x / softcap) * scale
                else:
                    x = x * scale
                    d = dist[:, t0:t1].abs()
                    if F == "alibi_before_softcap" and softcap is not None and slopes is not None:
                        x = x - slopes[:, None, None] * d
                    if F == "softcap_after_mask" and softcap is not None:
                        x = x.masked_fill(~vt, -math.inf)
                    if softcap is not None:
                        x = softcap * torch.tanh(x / softcap)
                        if F == "kscale_after_softcap" and k_scale is not None and k_scale.dim() < 2:
                            ksx = k_scale[kvh][:, None, None] if k_scale.dim() else k_scale
                            x = x * ksx
                if slopes is not None and not (F == "alibi_before_softcap" and softcap is not None):
                    d = dist[:, t0:t1]
                    if F == "alibi_ctx_abs" and new_k is not None:
                        d = d + ctx * (torch.arange(t0, t1) >= ctx)
                    if F == "alibi_split_local":
                        d = d + p0
                    x = x - slopes[:, None, None] * d.abs()
                if not (F == "softcap_after_mask" and softcap is not None):
                    x = x.masked_fill(~vt, -math.inf)
                m2 = torch.maximum(mx, x.amax(-1))
                safe = m2 if F == "neg_inf_tile" else m2.masked_fill(m2 == -math.inf, 0)
                p = torch.exp(x - safe[..., None])
                f = torch.exp(mx - safe)
                if F == "p_fp8" and k_pages.element_size() == 1 and format != "int8":
                    pv = p.to(torch.float8_e4m3fn).float() @ v
                else:
                    pv = p @ v
                fa = f
                if F == "acc_not_rescaled":
                    fa = torch.where(mx == -math.inf, 0.0, 1.0)
                if F == "lazy_rescale":
                    fa = f = torch.where((m2 - mx) * 1.4427 < 8, 1.0, f)
                l = l * f + p.sum(-1)
                acc = acc * fa[..., None] + pv
                if F == "acc_fp16_256" and D >= 256:
                    acc = acc.half().float()
                mx = m2
            if F in ("sink_per_split", "two_split_sink") and snk is not None:
                m2 = torch.maximum(mx, snk[:, None])
                f = torch.exp(mx - m2)
                l, acc, mx = l * f + torch.exp(snk[:, None] - m2), acc * f[..., None], m2
            parts.append((mx, l, acc))
        if F == "random_merge" and len(parts) > 2:
            parts = [parts[i] for i in torch.randperm(len(parts), generator=STATE.setdefault("g", torch.Generator())).tolist()]
        if parts:
            m = torch.stack([p[0] for p in parts]).amax(0)
        else:
            m = torch.full((H, n), -math.inf)
        inner = F in ("sink_per_split", "two_split_sink")
        if snk is not None and not (inner and parts):
            m = torch.maximum(m, snk[:, None])
        safe = m.masked_fill(m == -math.inf, 0)
        l, acc = torch.zeros(H, n), torch.zeros(H, n, VD)
        for pm, pl, pa in parts:
            f = (
                torch.ones_like(m)
                if F == "merge_no_rescale" or (F == "merge_no_rescale2" and len(parts) > 1 and snk is None)
                else torch.exp(pm - safe)
            )
            l, acc = l + pl * f, acc + pa * f[..., None]
        keys = l
        if snk is not None and not (inner and parts):
            l = l + torch.exp(snk[:, None] - safe)
        o = acc / torch.where(l == 0, 1.0, l)[..., None]
        if nan_tail is not None:
            o = o + nan_tail[:, None]
        o = o.transpose(0, 1)
        if F == "hint_rows" and max_q_len is not None:
            n = min(n, -(-max_q_len // 16) * 16)
        out[a : a + n] = o[:n].to(out.dtype)
        if lse is not None:
            e = safe + torch.log(keys if F == "lse_no_sink" else l)
            if F == "lse_last_split" and parts:
                pm, pl, _ = parts[-1]
                e = pm + torch.log(pl)
            if F == "two_window_lse" or (F == "lse_scaled_softcap" and softcap is not None):
                e = e * 1.4426950408889634
            lse[a : a + n] = e.T[:n]


def _make(name):
    def fn(
        *,
        q,
        k_pages,
        v_pages,
        page_table,
        kv_lens,
        q_starts,
        out,
        scale,
        window,
        softcap,
        alibi,
        sinks,
        causal,
        mask,
        positions,
        q_scale,
        batch_invariant,
        k_scale,
        v_scale,
        new_k,
        new_v,
        lse,
        layout,
        format,
        max_q_len,
        max_kv_len,
    ):
        attention(
            name,
            q=q,
            k_pages=k_pages,
            v_pages=v_pages,
            page_table=page_table,
            kv_lens=kv_lens,
            q_starts=q_starts,
            out=out,
            scale=scale,
            window=window,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
            causal=causal,
            mask=mask,
            positions=positions,
            q_scale=q_scale,
            batch_invariant=batch_invariant,
            k_scale=k_scale,
            v_scale=v_scale,
            new_k=new_k,
            new_v=new_v,
            lse=lse,
            layout=layout,
            format=format,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
        )

    fn.__name__ = name
    return fn


for _name in FAULTS:
    globals()[_name] = _make(_name)


@wraps(ok)  # type: ignore[name-defined]  # noqa: F821
def lse_jitter(**call):
    ok(**call)  # type: ignore[name-defined]  # noqa: F821
    if call["lse"] is not None:
        live = int(call["q_starts"][-1])
        call["lse"][:live] *= 1 + torch.randint(-3, 4, call["lse"][:live].shape) * 1.2e-7
