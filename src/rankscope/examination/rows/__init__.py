"""What is said about outcomes: rows, each beside its smallest bad and good program."""
