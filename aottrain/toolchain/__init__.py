"""C++ source to loaded objects, and what is kept on disk between processes."""
