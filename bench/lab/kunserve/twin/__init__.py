"""The twin of a cluster that drops replicated layers: the production control (`remap_serve.cluster.control`) and planners in
virtual time.

    events      what happens next
    setup       instances, their network, what computing takes
    network     ports, priorities, pieces
    lanes       who runs in the next microbatch in the systems that are compared, where that is not as in the library
    pipeline    one group: stages, microbatches, requests
    host        KV that goes to host memory (InferCept)
    migration   requests that move (Llumnix)
    systems     what is compared
    loads       KunServe's data sets and bursts
    world       all of it, driven by control
    results     answers and figures
"""
