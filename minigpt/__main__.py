"""`python -m minigpt`: the environment first, then the command line."""

from minigpt.system import prepare_environment

if __name__ == "__main__":
    prepare_environment()
    from minigpt.cli import main

    raise SystemExit(main())
