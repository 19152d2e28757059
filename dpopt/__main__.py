"""`python -m dpopt` is `dpopt`."""

from dpopt.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
