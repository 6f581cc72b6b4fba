"""Reports of broken models from public issue trackers, re-created small, each with a healthy twin."""
