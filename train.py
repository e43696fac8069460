"""python train.py variant=eagle: the same as `eaglelab train variant=eagle`."""

from eaglelab.cli.train import main

if __name__ == "__main__":
    main()
