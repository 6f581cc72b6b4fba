"""Several processes at one measurement: how they find each other, agree, and end together."""
