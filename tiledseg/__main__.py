"""`python -m tiledseg COMMAND ...`."""

from tiledseg.cli import enter

if __name__ == "__main__":
    enter()
