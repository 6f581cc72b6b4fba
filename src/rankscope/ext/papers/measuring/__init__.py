"""How reproductions measure: parts of work that can be resumed, and one network after the other into one table."""
