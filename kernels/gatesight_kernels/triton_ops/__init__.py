"""Triton kernels and their launchers; loaded when the first of them runs.

Names in kernels: `p_` pointer, `b_` block of values, `o_` offsets, `m_` mask, `i_` index of the program.
"""
