"""Small tasks, small networks, and the loop that trains one on the other."""
