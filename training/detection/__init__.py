"""Detection: boxes of pictures read, a detector trained, used and measured."""
