"""`python -m quire` is the command line."""

from quire.cli import main

raise SystemExit(main())
