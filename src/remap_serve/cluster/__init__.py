# SPDX-License-Identifier: Apache-2.0
"""A cluster of instances that serve one model, and that merge into pipelines while KV is short (KunServe).

    messages   values that go between control and instances: plans, reports, commands, events
    control    the state machine that decides: events in, commands out; no clock and no IO
    ledger     every request: where it is, and which of its tokens were delivered
    service    control and ledger together: from a question to its last token

These are pure, and the simulator drives control with the same messages. `remap_serve.policy.cluster` decides which instances
merge. One instance:

    instance   what control asks of it: a stage of a group, always, if only of a group of one
    instance_loop  the thread that computes; outbox: what it has for control; submissions: requests
    change     the changes prepared, committed, aborted; prepared: the links of a group that is to be
    switch     how it becomes a member of the group that was decided
    member     its state between two changes; resources: its own in any group; counts: its work
    probes     what passes cost, measured before it serves
    passes     a microbatch's way through a member: head (schedules, in as many lanes as the group has stages), stage (layers)
    own_layers how layers leave, and come home; layer_copies: from other instances; room: the group's room then
    beside     KV's room in layers that stream, and in idle models, while an instance is alone
    exchange   KV that moves when groups change; throughput: how fast the network was
    slots      where the logical blocks of a stage lie; pool: their numbers; stage_kv: the views of its layers
    transport  messages and tensors between instances; wire: the messages

And what serves:

    front         connects the service with instances and callers
    keeper        the front of several servers, as a Ray actor (ray_keeper); shared_front: as one of these servers has it
    ray_cluster   instances as Ray actors; served_model: the model that they serve
    server        OpenAI's endpoints; openai: their bodies; answer_text: tokens into text; metrics: figures for Prometheus
"""
