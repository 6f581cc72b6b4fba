"""``masks``: what does a mask do to collapse?"""

from rankscope.verbs._spec import Verb, verb

MASKS = verb(
    Verb(
        name="masks",
        question="What does a mask do to collapse?",
        answer="Reports centre nodes, radius, diameter, second eigenvalue and the layers until tokens agree.",
        run="verbs.masks.run:mask_graph",
        command="cli.graphing:masks_command",
        examples=(
            "masks causal 'causal_window(4) | sink(1)' --tokens 32",
            "masks 'window(3)' --tokens 64 --json",
        ),
        order=60,
    )
)
