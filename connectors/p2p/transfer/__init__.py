"""The thread that moves bytes, and the rows where blocks of another size land."""
