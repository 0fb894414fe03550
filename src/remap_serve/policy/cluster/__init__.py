# SPDX-License-Identifier: Apache-2.0
"""Several instances of one model that give up copies of its layers for KV and serve as pipelines meanwhile. Pure.

Under a burst, instances merge into groups. Each instance of a group keeps a run of consecutive layers and uses the pages of
the others for KV; together they hold the whole model. A dropped layer is one more state of a layer: computed elsewhere.
Later the layers come back and the group is dissolved. Where what is decided:

    placement   the words: layers, instances with their load, stages, groups; the invariant, and capacity in tokens
    dispatch    how loaded a group is, where requests go, how many tokens the cluster lacks
    stages      which consecutive layers each instance of a group computes
    pipeline    how long a pass through such stages takes: rounds of decoding, queues of microbatches, their bubbles
    drop        which groups merge, what that costs, and which offers of instances alone cost more
    foresight   dropping before KV runs out: a forecast, and when to believe it
    shortage    what dropping cannot free, and how many more instances would have it
    restore     the copies that dissolve a group, their sources, and whether that pays
    exchange    which KV moves when groups change, in which chunks, and how long activations wait for them
    lookahead   the cost of a microbatch, and the division of queued requests into microbatches
    allowances  how much of what waits the next microbatch of a lane takes, beside what decodes there

Nothing here copies, maps, sends or measures: callers pass placements, loads and measured times in, and carry plans out.
Source: KunServe (sections 4.1 to 4.4); each module says what it corrects or decides where the paper is silent.
"""
