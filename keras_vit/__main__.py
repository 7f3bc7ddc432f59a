"""`python -m keras_vit COMMAND …`, the same as `keras-vit COMMAND …` where its script is not on the path."""

from keras_vit.cli.commands import main

if __name__ == "__main__":
    main()
