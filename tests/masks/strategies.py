"""Masks drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from rankscope.masks import MASKS, Mask

small = st.integers(0, 5)
positive = st.integers(1, 5)

named: st.SearchStrategy[Mask] = st.one_of(
    st.builds(lambda name: MASKS[name](), st.sampled_from(["complete", "causal"])),
    st.builds(lambda name, w: MASKS[name](w), st.sampled_from(["window", "causal_window", "prefix"]), small),
    st.builds(lambda name, c: MASKS[name](c), st.sampled_from(["sink", "global_tokens"]), positive),
    st.builds(lambda d, s: MASKS["random_sparse"](d, seed=s), small, small),
)
masks: st.SearchStrategy[Mask] = st.recursive(
    named,
    lambda part: st.one_of(
        st.builds(lambda a, b: a | b, part, part),
        st.builds(lambda a, b: a & b, part, part),
        st.builds(lambda a: ~a, part),
    ),
    max_leaves=6,
)
lengths = st.integers(1, 12)
