"""The loop and what it needs: one step protocol, many engines. It never imports the compiler."""
