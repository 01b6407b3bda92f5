"""``python -m titan_tune``."""

from titan_tune.cli import main

if __name__ == "__main__":
    main()
