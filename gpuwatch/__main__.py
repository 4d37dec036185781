"""`python -m gpuwatch`."""

from gpuwatch.commands import main

if __name__ == "__main__":
    main()
