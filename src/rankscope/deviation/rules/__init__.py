"""How each ATen operation acts on a deviation; one file per group, read by importing this package."""

from rankscope.deviation.rules import (
    activations as activations,
)
from rankscope.deviation.rules import (
    arithmetic as arithmetic,
)
from rankscope.deviation.rules import (
    attention as attention,
)
from rankscope.deviation.rules import (
    choices as choices,
)
from rankscope.deviation.rules import (
    indexing as indexing,
)
from rankscope.deviation.rules import (
    norms as norms,
)
from rankscope.deviation.rules import (
    piecewise as piecewise,
)
from rankscope.deviation.rules import (
    products as products,
)
from rankscope.deviation.rules import (
    reductions as reductions,
)
from rankscope.deviation.rules import (
    shapes as shapes,
)
from rankscope.deviation.rules import (
    softmax as softmax,
)
