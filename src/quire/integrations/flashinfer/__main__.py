"""Writes the files of trace-apply: `python -m quire.integrations.flashinfer DIR --q-heads 32 ...`."""

from __future__ import annotations

from pathlib import Path

import click

from quire.integrations.flashinfer.definitions import Sizes, write


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--q-heads", type=click.IntRange(1), required=True, help="Heads of the query, on one device.")
@click.option("--kv-heads", type=click.IntRange(1), required=True, help="Heads of the cache, on one device.")
@click.option("--head-dim", type=click.IntRange(1, 512), required=True, help="Size of a head.")
@click.option("--page-size", type=click.IntRange(1), required=True, help="Slots of a page.")
def main(folder: Path, q_heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    for path in write(folder, Sizes(q_heads, kv_heads, head_dim, page_size)):
        click.echo(path)


if __name__ == "__main__":
    main()
