"""Text and files of tokens: read, checked, cut into windows."""
