"""``python -m kvferry``: how the processes of a local cluster are started."""

from kvferry.cli import main

if __name__ == "__main__":
    main()
