"""Oneiros' Eq. 4 and 5 for equal layers and `uniform` spacing, made exact for any n and m. To test `remap.schedule` against."""

from __future__ import annotations


def stall_uniform(layers: int, compute: float, transfer: float, remapped: int, buffers: int) -> float:
    """Seconds a pass waits. compute, transfer: seconds a layer. With m = remapped + buffers, W = n // m - 1, rho = n mod m:

    * one buffer: rho * (transfer - (W+1) compute)+ + (m - rho) * (transfer - W compute)+. Exact for every n and m;
      when m divides n it is Oneiros' Eq. 4, ((alpha+1)(T_T + T_c) - n T_c)+.
    * beta >= 2 buffers: (m transfer - n compute)+, Oneiros' Eq. 5 for beta = 2. Exact for rotating slots (no exception
      found for n <= 80, m not dividing n included) and for fixed slots when beta divides m. Else fixed slots wait for
      longer, except that with m < 2 beta they copy fewer than m layers.
    """
    if remapped == 0:
        return 0.0
    streamed = remapped + buffers
    if buffers > 1:
        return max(0.0, streamed * transfer - layers * compute)
    between, wide = layers // streamed - 1, layers % streamed
    late_wide = max(0.0, transfer - (between + 1) * compute)
    return wide * late_wide + (streamed - wide) * max(0.0, transfer - between * compute)
