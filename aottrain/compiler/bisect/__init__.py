"""Which stage of the compiler first gives another value than eager, and a script that shows it."""
