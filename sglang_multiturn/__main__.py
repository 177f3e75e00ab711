"""`python -m sglang_multiturn` and the `sglang-multiturn` command."""

from __future__ import annotations

import sys

from sglang_multiturn.errors import SglangMultiturnError


def main() -> None:
    """Run the command line; our own errors end as one message and exit code 1."""
    from sglang_multiturn.cli import app

    try:
        app()
    except SglangMultiturnError as error:
        sys.exit(f"sglang-multiturn: {error}")


if __name__ == "__main__":
    main()
