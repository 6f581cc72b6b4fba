"""The playground: a small transformer of one's own choice, its tokens followed through every block."""
