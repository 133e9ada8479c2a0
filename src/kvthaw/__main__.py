"""``python -m kvthaw``."""

from kvthaw.cli import main

if __name__ == "__main__":
    main()
