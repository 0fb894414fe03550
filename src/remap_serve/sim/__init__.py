# SPDX-License-Identifier: Apache-2.0
"""The digital twin: the effects of remapping, without the machine.

Arithmetic (pure), from the tables of `remap.policy.hardware`: `roofline` (what computing takes), `fit` (a machine of one's own),
`planning` (`remap plan`), `workload`, `lengths` and `loads` (who asks for what, and when), `results`, `policies`,
`ideal` (how much of the gap to more memory a policy closes).

Serving in virtual time, with the production session on the `sim` backend and the reference engine's loop and turns: `serving`
(setup, `simulate`), `worlds` (session, tenants, engines), `running` (turns, and passes that overlap), `engine` and `sequences`
(the loop's kind that has lengths for tokens), `passes` (its runner: a pass on the device), `scheduling` (vLLM V0's
policy), `pools` and `clock` (for Pie, which the library does not have), `timeline`.
"""
