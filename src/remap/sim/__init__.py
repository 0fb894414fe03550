"""The digital twin: what remapping would do, without the machine.

Tables and arithmetic (pure): `hardware` (machines and models), `roofline` (what computing takes), `fit` (a machine of one's own),
`planning` (`remap plan`), `workload`, `lengths` and `loads` (who asks for what, and when), `results`, `policies`.

Serving in virtual time, with the production session on the `sim` backend: `serving` (setup, `simulate`), `worlds` (session,
tenants, engines), `running` (whose turn it is), `engine` (one tenant's steps), `scheduling` (who runs in a pass), `passes` (what
a pass does on the device), `pools` and `clock` (for Pie, which the library does not have), `timeline`.
"""
