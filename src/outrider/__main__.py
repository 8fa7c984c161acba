"""``python -m outrider``."""

if __name__ == "__main__":  # a worker imports this file too, and needs no commands
    from .cli import main

    main()
