"""Images in channels_last: which calls of a program work so, and the program in which they do."""
