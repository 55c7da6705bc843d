"""The command line: `quire`, and `python -m quire`. Only what handles Ctrl-C is imported first."""

from quire import interrupts


def main() -> int:
    """Runs the command of this process and returns its exit status."""
    interrupts.begin()
    try:
        from quire.cli import main as run

        code = run()
        interrupts.ignore()
    except KeyboardInterrupt:
        interrupts.end()
        raise
    return code


if __name__ == "__main__":
    raise SystemExit(main())
