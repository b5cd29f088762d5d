"""``python -m malletrain``: the command line, for where the console script is not on the path."""

from malletrain.cli import main

if __name__ == "__main__":
    main(prog_name="malletrain")
