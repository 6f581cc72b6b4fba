"""Training runs that go wrong in known ways, and healthy ones that look unusual: a benchmark of alarms.

One declaration per run (:mod:`.declared`). Each is trained once, and its readings are stored, so that any detector can
be evaluated on them later without training again::

    python -m benchmarks.failing_runs train --keep RUNS --seeds 0 1 2 3 4     # continues where it stopped
    python -m benchmarks.failing_runs train --keep RUNS --seeds 5 6 --size long --healthy      # a reading every step
    python -m benchmarks.failing_runs evaluate --keep RUNS --size tiny long --out FILE
"""
