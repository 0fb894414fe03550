"""Mutants of the core: does the suite notice the mistakes that a refactoring could make?

    python tools/mutants.py [--only PATTERN] [--list] [--jobs N]

Each mutant is one small wrong change and names the few tests that must fail because of it. The tool copies the repository's
tracked files to a temporary folder and works there only, with the packages of the Python that runs it:

    Python mutants   the tests import the copy's sources, beside the compiled `remap._core` that is installed
    C++ mutants      the copy is built once, then again after each change; its ctests are run

First all named tests have to pass without any mutant. Then each mutant is

    killed              a named test failed, or did not end within TIMEOUT_S seconds
    SURVIVED            all named tests passed: a test is lacking
    no longer applies   its text is not found in its file, or more than once: the mutant has to be written anew
    not judged          the tests could not be run, or the mutant does not compile: says nothing about the tests

When code moves, move its mutants along: change `file`, `text` and `tests`, and keep what it breaks.

Exit code: 0 if all are killed; 1 if one is not, or the tests fail without any mutant; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300.0
BUILD_TIMEOUT_S = 1800.0
SHOWN_LINES = 15  # of the output of tests that could not be run

KILLED, SURVIVED, GONE, NOT_JUDGED = "killed", "SURVIVED", "no longer applies", "not judged"


@dataclass(frozen=True)
class Mutant:
    """One wrong change. text: what is replaced; it occurs exactly once in `file`. breaks: what is wrong then, in one sentence.

    tests: what must fail because of it, as narrow as possible; for Python sources pytest's paths and node ids (below
    tests/python or tests/serve), for C++ sources names of ctests.
    """

    name: str
    file: str
    text: str
    replacement: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def is_cpp(self) -> bool:
        """Whether it needs a build."""
        return not self.file.endswith(".py")

    @property
    def area(self) -> str:
        """The part of the core that it is about: the first word of its name."""
        return self.name.split("-")[0]

    @property
    def module(self) -> str:
        """The Python module that it changes: src/remap/kv/pool.py is remap.kv.pool."""
        return ".".join(Path(self.file).relative_to("src").with_suffix("").parts)


MUTANTS: tuple[Mutant, ...] = (
    # -- planner: which pages change hands, in which order, from whom ---------------------------------------------------
    Mutant(
        name="planner-tail-of-small-layer",
        file="src/remap/memory/pages.py",
        text="tails[layer] = min(depth, sizes[layer])",
        replacement="tails[layer] = depth",
        breaks="A layer with fewer pages than the tail is taken to stream more than it has (a lost `min`).",
        tests=("test_planner.py::test_copies_in_bytes",),
    ),
    Mutant(
        name="planner-ring-one-buffer-too-few",
        file="cpp/core/tenant_pages.cpp",
        text="if (ring.size() == target.buffers && depth() == target.depth) {",
        replacement="if (!ring.empty() && depth() == target.depth) {",
        breaks="A change from one ring buffer to two keeps the ring of one.",
        tests=("tenant_pages_test",),
    ),
    Mutant(
        name="planner-lost-buffer-does-not-move",
        file="cpp/core/tenant_pages.cpp",
        text="there.ring[index] : PageList{};\n    made.ring_moves",
        replacement="there.ring[index] : old;\n    made.ring_moves",
        breaks="A ring that loses a buffer does not count as moving, so copies in flight write into pages that are KV by then.",
        tests=("tenant_pages_test",),
    ),
    Mutant(
        name="planner-ring-pages-not-fetched",
        file="cpp/core/tenant_pages.cpp",
        text="      if (!its.count(page)) stay.insert(page);\n",
        replacement="      stay.insert(page);\n",
        breaks="Lent pages that the ring needs are not asked back.",
        tests=("tenant_pages_test",),
    ),
    Mutant(
        name="planner-tails-at-the-front",
        file="cpp/core/tenant_pages.cpp",
        text="const std::size_t slot = (index + 1) * now.buffer_pages - fresh.size();",
        replacement="const std::size_t slot = index * now.buffer_pages;",
        breaks="The ring's region shows a slice at the front of its buffer instead of at the end.",
        tests=("tenant_pages_test",),
    ),
    Mutant(
        name="planner-elsewhere-is-lendable",
        file="cpp/core/tenant_pages.cpp",
        text="for (const PageId page : layers[layer].hidden() ? *layers[layer].own : away(layer)) {",
        replacement="for (const PageId page : away(layer)) {",
        breaks="Pages of layers that are computed elsewhere count as anybody's KV, and are given to other tenants for good.",
        tests=("tenant_pages_test",),
    ),
    Mutant(
        name="planner-elsewhere-region-stays",
        file="cpp/core/tenant_pages.cpp",
        text="shows.empty() ? PageList(shown.size(), kNoPage) : shows, true, layer);",
        replacement="shows.empty() ? shown : shows, true, layer);",
        breaks="The region of a layer that is computed elsewhere is to show pages that are KV.",
        tests=("tenant_pages_test",),
    ),
    Mutant(
        name="planner-elsewhere-is-computed",
        file="src/remap/tenant.py",
        text="if isinstance(layer, int) and not state.pages.computes(layer):",
        replacement="if False:",
        breaks="A pass computes with a layer whose pages are KV.",
        tests=("test_place.py::test_a_pass_that_computes_what_is_elsewhere_is_refused",),
    ),
    Mutant(
        name="planner-given-up-home-is-kept",
        file="cpp/core/tenant_pages.cpp",
        text="    if ((before.where == Where::cold) == (after.where == Where::cold)) continue;\n",
        replacement="    continue;\n",
        breaks="The core goes on holding pages that a layer gave up for its home, so that no other layer can have them.",
        tests=("tenant_pages_test",),
    ),
    Mutant(
        name="lending-cold-takes-what-was-lent",
        file="src/remap/memory/cold.py",
        text="if page in tenant.placed and page not in claimed and page not in self.borrowed",
        replacement="if page in tenant.placed",
        breaks="Pages that a tenant has lent, and that are free now, become another tenant's layers.",
        tests=("test_cold.py::test_pages_that_somebody_has_lent_become_no_home",),
    ),
    Mutant(
        name="lending-first-blocks-may-be-taken",
        file="src/remap/memory/lend.py",
        text="own = donor.pages.kv_from_homes | donor.books.kept",
        replacement="own = donor.pages.kv_from_homes",
        breaks="The pages that a tenant got for its min_blocks with its layers are given away while its own layers are KV.",
        tests=("test_cold.py::test_first_blocks_stay_whoever_asks",),
    ),
    Mutant(
        name="schedule-ring-outlives-new-weights",
        file="src/remap/memory/rewrite.py",
        text="Transition(pages, home, True)",
        replacement="Transition(pages, home, False)",
        breaks="Behind new weights the next pass computes with what the ring had of the old ones.",
        tests=("test_rewrite.py::test_layers_that_are_away_have_them_in_the_next_pass",),
    ),
    Mutant(
        name="schedule-front-outlives-new-weights",
        file="src/remap/memory/rewrite.py",
        text="Transition(pages, home, True)",
        replacement="Transition(pages, (), True)",
        breaks="Of layers that stream in part, the part at home keeps the old weights.",
        tests=("test_rewrite.py::test_layers_that_are_away_have_them_in_the_next_pass",),
    ),
    Mutant(
        name="planner-old-stream-waits-for-itself",
        file="src/remap/memory/streams.py",
        text="self._streams.backend.stream_wait(handle, event)",
        replacement="self._streams.backend.stream_wait(self.handle, event)",
        breaks="A pass on another stream does not wait for what is enqueued on the former one.",
        tests=("test_sim_session.py::test_a_pass_on_another_stream_begins_behind_the_former_one",),
    ),
    Mutant(
        name="planner-idle-tenant-gives-one-more",
        file="src/remap/memory/donors.py",
        text="giver.select(cap + 1, buffers, kind)) <= bound",
        replacement="giver.select(cap, buffers, kind)) <= bound",
        breaks="An idle tenant offers one layer more than its first prefill can hide (off by one).",
        tests=(
            "test_sharing_controller.py::test_an_inactive_tenant_gives_exactly_as_much_as_its_next_prefill_may_be_late",
        ),
    ),
    Mutant(
        name="planner-two-active-donors-copy-more",
        file="src/remap/policy/donors/supply.py",
        text="(places[:1], places[1:]) if one_active else",
        replacement="(places[:1], places[1:]) if False else",
        breaks="Beside active neighbours two active donors copy more, each certified against what the other copied before.",
        tests=("test_supply.py::test_one_active_donor_may_copy_more",),
    ),
    Mutant(
        name="planner-reloads-cost-nothing",
        file="src/remap/policy/donors/supply.py",
        text="cost += quote.stall_s + quote.share * quote.reload_s",
        replacement="cost += quote.stall_s",
        breaks="A model gives layers just before its turn, although others would stream unnoticed.",
        tests=(
            "test_supply.py::test_what_a_giver_needs_soon_is_dearer_than_what_is_streamed",
            "test_sharing_controller.py::test_what_a_paused_model_needs_soon_is_left_to_it",
        ),
    ),
    Mutant(
        name="planner-last-cheaper-run-overlooked",
        file="src/remap/policy/donors/supply.py",
        text="if not later or min(later) >= least:",
        replacement="if later:",
        breaks="A costly increment hides the cheap one behind it.",
        tests=("test_supply.py::test_a_costly_increment_does_not_hide_the_cheap_one_behind_it",),
    ),
    # -- cluster: who computes which layers, and what moves ------------------------------------------------------------------
    Mutant(
        name="cluster-layer-computed-twice",
        file="src/remap_serve/policy/cluster/placement.py",
        text="if computed != list(range(count)) or",
        replacement="if set(computed) != set(range(count)) or",
        breaks="A group whose stages compute a layer twice, or out of order, passes as a complete copy.",
        tests=("test_cluster_placement.py::test_a_group_without_a_complete_copy_is_refused",),
    ),
    Mutant(
        name="cluster-stage-computes-what-it-lacks",
        file="src/remap_serve/policy/cluster/stages.py",
        text="if k > until[j]:",
        replacement="if k > until[j] + 1:",
        breaks="A stage is given the layer behind those that its instance holds (off by one).",
        tests=("test_cluster_stages.py::test_a_fused_cluster_is_divided_for_most_tokens",),
    ),
    Mutant(
        name="cluster-mergers-in-vain",
        file="src/remap_serve/policy/cluster/drop.py",
        text="if more <= 0:",
        replacement="if more == 0:",
        breaks="Groups merge although that frees nothing.",
        tests=("test_cluster_drop.py::test_thirds_and_a_whole_copy_do_not_merge",),
    ),
    Mutant(
        name="cluster-relief-counts-as-a-gain",
        file="src/remap_serve/policy/cluster/drop.py",
        text="return self.requests(part) * max(0.0, self.round_s(part) - before)",
        replacement="return self.requests(part) * (self.round_s(part) - before)",
        breaks="A merger that relieves a full instance counts as a gain, and groups merge in vain.",
        tests=("test_cluster_drop.py::test_a_plan_is_the_best_of_all_partitions",),
    ),
    Mutant(
        name="cluster-donors-compared-whole",
        file="src/remap_serve/policy/cluster/drop.py",
        text="(more[2] - here[2]) * freed > added_s * (more[0] - here[0])",
        replacement="(more[2] - here[2]) > added_s",
        breaks="Streaming and a drop are compared by what they cost in all, not for each token of room.",
        tests=("test_cluster_drop.py::test_a_drop_that_costs_less_than_streaming_comes_first",),
    ),
    Mutant(
        name="cluster-stages-may-stream",
        file="src/remap_serve/policy/cluster/placement.py",
        text="return self.offers if self.end - self.first == len(model.layers) else ()",
        replacement="return self.offers",
        breaks="Layers of a stage of several count as room, though none of them may stream.",
        tests=("test_cluster_placement.py::test_what_streams_counts_for_an_instance_alone",),
    ),
    Mutant(
        name="cluster-borrowed-pages-stay",
        file="src/remap_serve/cluster/beside.py",
        text="    changed(member, partial(advanced.give_back, has.session, has.name))\n",
        replacement="",
        breaks="A stage keeps KV in pages that another model lent and may take back.",
        tests=(
            "test_cluster_instance.py::test_pages_of_an_idle_model_are_kv_before_a_group_and_after_it_and_go_back_when_it_wakes",
        ),
    ),
    Mutant(
        name="cluster-layer-is-here-before-its-bytes",
        file="src/remap_serve/cluster/layer_copies.py",
        text="if come + nbytes < self._layer_bytes(layer):",
        replacement="if come + nbytes < self._layer_bytes(layer) // 2:",
        breaks="A layer counts as complete when half of its bytes have come from another instance.",
        tests=("test_cluster_instance.py::test_layers_come_home_from_each_other_and_from_the_host",),
    ),
    Mutant(
        name="cluster-two-restorations-at-once",
        file="src/remap_serve/cluster/own_layers.py",
        text="        unfetch(member, member.fetching)\n",
        replacement="        pass\n",
        breaks="A restoration that begins before the abort of the last one has come asks nobody for its layers.",
        tests=(
            "test_cluster_instance.py::test_a_restoration_may_begin_before_the_last_one_is_known_to_be_over[given up-i0+i1]",
        ),
    ),
    Mutant(
        name="planner-what-waits-for-bytes-is-not-loaded",
        file="cpp/core/tenant_pages.cpp",
        text="const std::uint32_t had = gone ? after.size() : before.tail;",
        replacement="const std::uint32_t had = before.absent();",
        breaks="A layer whose bytes were to come from another instance, and do not, is computed without them.",
        tests=("tenant_pages_test",),
    ),
    Mutant(
        name="cluster-sender-is-always-free",
        file="src/remap_serve/policy/cluster/restore.py",
        text="begin = max(arrives[name], sends[source])",
        replacement="begin = arrives[name]",
        breaks="An instance is taken to send to several others at once, each at its full rate.",
        tests=("test_cluster_restore.py::test_each_missing_layer_comes_once_and_each_way_carries_one_at_a_time",),
    ),
    Mutant(
        name="cluster-bound-between-neighbours",
        file="src/remap_serve/policy/cluster/lookahead.py",
        text="        bound = min(bound, math.nextafter(high, low))\n",
        replacement="        bound = min(bound, high)\n",
        breaks="A division does not end where the mean of two bounds is the upper one.",
        tests=("test_cluster_lookahead.py::test_it_ends_where_the_mean_of_two_bounds_is_the_upper_one",),
    ),
    Mutant(
        name="cluster-line-behind-the-head",
        file="src/remap_serve/policy/cluster/dispatch.py",
        text="dispatch([load.wanted for load in loads]",
        replacement="dispatch([load.demand for load in loads]",
        breaks="Requests go where a long line waits, since only its head counts.",
        tests=("test_cluster_control.py::test_a_request_goes_where_the_whole_line_is_shortest",),
    ),
    Mutant(
        name="cluster-twin-links-without-reservation",
        file="bench/lab/kunserve/twin/network.py",
        text="wanted.get(port, rank) >= rank",
        replacement="wanted.get(port, rank) >= 0",
        breaks="Bulk begins on a port that an activation waits for.",
        tests=("test_cluster_twin.py::test_nothing_begins_on_a_port_that_a_higher_priority_waits_for",),
    ),
    Mutant(
        name="cluster-twin-port-carries-two",
        file="bench/lab/kunserve/twin/network.py",
        text="self._busy.update(one.ports)",
        replacement="self._busy.update(one.ports[:1])",
        breaks="An instance receives from two others at once.",
        tests=("test_cluster_twin.py::test_a_port_carries_one_piece_and_everything_arrives",),
    ),
    Mutant(
        name="cluster-twin-blocks-stay-taken",
        file="bench/lab/kunserve/twin/pipeline.py",
        text="        self.pool.free(request.blocks)\n        request.blocks = []",
        replacement="        request.blocks = []",
        breaks="What moves to another group leaves its blocks behind.",
        tests=("test_cluster_twin.py::test_running_requests_move_to_the_emptiest_instance",),
    ),
    Mutant(
        name="cluster-later-chunks-forget-the-earlier",
        file="src/remap_serve/policy/cluster/lookahead.py",
        text="return self._cost.chunk(prefix + first, end - first)",
        replacement="return self._cost.chunk(prefix, end - first)",
        breaks="A request's later chunk is taken not to attend to the tokens of its earlier ones.",
        tests=("test_cluster_lookahead.py::test_the_largest_microbatch_is_the_least_possible",),
    ),
    Mutant(
        name="cluster-neighbouring-bounds",
        file="src/remap_serve/policy/cluster/lookahead.py",
        text="bound = min(bound, math.nextafter(high, low))",
        replacement="bound = min(bound, high)",
        breaks="The search for the largest microbatch tries a bound that is known to suffice, for ever.",
        tests=("test_cluster_lookahead.py::test_bounds_that_are_neighbours_end",),
    ),
    Mutant(
        name="cluster-places-begin-with-blocks",
        file="src/remap_serve/cluster/slots.py",
        text="slot = self._tails.pop(first, first * self.layers)",
        replacement="slot = first * self.layers",
        breaks="Blocks that continue a run begin anew, so places share slots or what was left over is lost.",
        tests=("test_cluster_slots.py::test_capacity_is_that_of_the_placement",),
    ),
    Mutant(
        name="cluster-places-in-blocks-that-leave",
        file="src/remap_serve/cluster/slots.py",
        text="            if not gone.isdisjoint(self._blocks_of(slot)):\n                kept[block]",
        replacement="            if slot // self.layers in gone:\n                kept[block]",
        breaks="A place that only ends in a block that leaves stays where it is.",
        tests=("test_cluster_slots.py::test_shrinking_moves_what_stays_and_gives_up_the_rest",),
    ),
    Mutant(
        name="cluster-shared-blocks-leave-with-the-first",
        file="src/remap_serve/cluster/slots.py",
        text="self._kept[span] -= 1",
        replacement="self._kept[span] = 0",
        breaks="A physical block with KV of two requests is used for something else when the first of them has left.",
        tests=("test_cluster_slots.py::test_a_departure_gives_each_block_back_once",),
    ),
    Mutant(
        name="cluster-stage-reads-its-first-layer",
        file="src/remap_serve/cluster/stage_kv.py",
        text="torch.arange(layer - self.first, end - self.first)",
        replacement="torch.arange(end - layer)",
        breaks="KV of a stage's later layers is read from, or written to, the slots of its first ones.",
        tests=("test_cluster_stage.py::test_a_stage_reads_and_writes_slots_and_nothing_else",),
    ),
    Mutant(
        name="cluster-two-microbatches-of-a-lane",
        file="src/remap_serve/cluster/head.py",
        text="if number in self._schedulers.flying or not lane.unfinished:",
        replacement="if not lane.unfinished:",
        breaks="A lane launches while a microbatch of it is in flight: its requests compute the same tokens again.",
        tests=("test_cluster_head.py::test_every_request_gets_its_tokens_whoever_shares_its_blocks",),
    ),
    Mutant(
        name="cluster-prompts-are-not-divided",
        file="src/remap_serve/cluster/lanes.py",
        text="lane.allow(self._allowances.take(number, self._decode_s, self._prompts))",
        replacement="lane.allow(None)",
        breaks="One microbatch takes the long prompt, and all stages go at its pace.",
        tests=("test_cluster_head.py::test_as_many_microbatches_as_lanes_and_prompts_in_equal_parts",),
    ),
    Mutant(
        name="cluster-an-awaited-token-changes-its-lane",
        file="src/remap_serve/cluster/lanes.py",
        text="if not self.awaits(sequence):",
        replacement="if True:",
        breaks="A prompt whose token is on its way goes on in another lane.",
        tests=("test_cluster_head.py::test_every_request_gets_its_tokens_whoever_shares_its_blocks",),
    ),
    Mutant(
        name="cluster-a-lost-part-counts",
        file="src/remap_serve/cluster/lanes.py",
        text="return schedule._replace(chunks=tuple(chunk for chunk in schedule.chunks if chunk.samples))",
        replacement="return schedule",
        breaks="A part whose request lost its blocks meanwhile counts as computed when it lands.",
        tests=("test_cluster_head.py::test_a_prompt_that_loses_its_blocks_while_a_part_is_in_flight_begins_anew",),
    ),
    Mutant(
        name="cluster-room-under-a-part-in-flight",
        file="src/remap_serve/cluster/head.py",
        text="(held if block in writing else found).append(block)",
        replacement="found.append(block)",
        breaks="KV of others is overwritten by a part of a request that is gone.",
        tests=("test_cluster_head.py::test_blocks_that_a_part_in_flight_may_write_to_are_no_room_for_kv_of_others",),
    ),
    Mutant(
        name="cluster-stage-computes-what-it-dropped",
        file="src/remap_serve/cluster/change.py",
        text="    if missing:\n        raise InvalidState(",
        replacement="    if missing and part.first == part.end:\n        raise InvalidState(",
        breaks="An instance prepares to compute layers that it gave up.",
        tests=("test_cluster_instance.py::test_plans_that_do_not_fit_are_refused_by_name_and_nothing_changes",),
    ),
    Mutant(
        name="cluster-stages-go-on-streaming",
        file="src/remap_serve/cluster/switch.py",
        text="    if old.alone and not new.alone:\n        # Behind the drop",
        replacement="    if old.alone and not old.stages:\n        # Behind the drop",
        breaks="Layers of a stage stream on; when they come home they move blocks that its places straddle.",
        tests=("test_cluster_instance.py::test_a_stage_lets_no_layer_stream",),
    ),
    Mutant(
        name="cluster-late-submission",
        file="src/remap_serve/cluster/contract.py",
        text="if epoch is not None and epoch < recovered:",
        replacement="if epoch is not None and epoch < 0:",
        breaks="A submission from before a recovery is taken after it, beside the request's next attempt.",
        tests=("test_cluster_instance.py::test_what_was_sent_before_a_recovery_is_refused_after_it",),
    ),
    Mutant(
        name="cluster-two-attempts-in-one-change",
        file="src/remap_serve/cluster/exchange.py",
        text="if self.attempt(each.id) is not None:",
        replacement="if self.attempt(each.id) == each.attempt:",
        breaks="Two attempts of one request may be handed over to one head, whose KV is mixed then.",
        tests=("test_cluster_pump.py::test_two_attempts_of_one_request_are_refused",),
    ),
    Mutant(
        name="cluster-model-of-who-comes-first",
        file="src/remap_serve/cluster/control.py",
        text="expected, got = self._fingerprint or description.fingerprint, description.fingerprint",
        replacement="expected, got = self._known and self._fingerprint or description.fingerprint, description.fingerprint",
        breaks="When all instances are gone, one of another model is taken, and goes on with half-answered requests.",
        tests=("test_cluster_control.py::test_an_instance_of_another_model_is_refused_by_name",),
    ),
    Mutant(
        name="cluster-freed-blocks-are-forgotten",
        file="src/remap_serve/cluster/exchange.py",
        text="self._departure is not None and not self._departure.live and not self._freed",
        replacement="self._departure is not None and not self._departure.live",
        breaks="An exchange may end with blocks that nobody has taken.",
        tests=("test_cluster_pump.py::test_any_number_of_requests_is_computed_again",),
    ),
    Mutant(
        name="cluster-text-that-may-begin-a-stop",
        file="src/remap_serve/cluster/answer_text.py",
        text="range(min(len(text), len(stop) - 1), 0, -1)",
        replacement="range(min(len(text), len(stop) - 2), 0, -1)",
        breaks="Text that lacks one letter of a stop is given out, and the stop shows in the answer (off by one).",
        tests=("test_cluster_answer_text.py::test_text_is_that_of_all_tokens_up_to_the_first_stop",),
    ),
    Mutant(
        name="cluster-half-a-letter-is-given-out",
        file="src/remap_serve/cluster/answer_text.py",
        text="if now.endswith(UNFINISHED) and not last:",
        replacement="if now.endswith(UNFINISHED) and last:",
        breaks="A letter whose bytes are several tokens becomes signs that stand for nothing.",
        tests=("test_cluster_answer_text.py::test_text_is_that_of_all_tokens_up_to_the_first_stop",),
    ),
    Mutant(
        name="cluster-caller-who-left-is-served",
        file="src/remap_serve/cluster/app.py",
        text="return_when=asyncio.FIRST_COMPLETED",
        replacement="return_when=asyncio.ALL_COMPLETED",
        breaks="The request of a caller who went away is served to its end.",
        tests=("test_cluster_server.py::test_a_caller_who_goes_away_cancels",),
    ),
    Mutant(
        name="cluster-refused-fields-are-ignored",
        file="src/remap_serve/cluster/openai.py",
        text="if value is not None and not nothing:",
        replacement="if value is not None and not nothing and nothing:",
        breaks="Who asks for a suffix gets an answer without it, and no word about it.",
        tests=("test_cluster_openai.py::test_what_there_is_not_is_refused_by_name",),
    ),
    Mutant(
        name="cluster-penalties-see-no-tokens",
        file="src/remap_serve/cluster/stage.py",
        text="if sampling.changes_logits or chunk.scores_prompt else",
        replacement="if chunk.scores_prompt else",
        breaks="Penalties count nothing where another stage than the first chooses tokens.",
        tests=("test_cluster_logprobs.py::test_where_layers_are_cut_changes_no_bit_of_tokens_and_logprobs",),
    ),
    Mutant(
        name="cluster-pages-of-layers-have-no-place",
        file="src/remap_serve/cluster/served_model.py",
        text="most, host = capacity // block.block_bytes + 1, swap",
        replacement="most, host = blocks, swap",
        breaks="The pages of layers that others compute have no place in the KV region.",
        tests=("test_cluster_served_model.py::test_memory_is_weights_and_kv_and_all_of_it_may_be_kv",),
    ),
    # -- schedule: what streaming costs, and which copy comes next --------------------------------------------------------
    Mutant(
        name="schedule-lone-user-is-copied",
        file="src/remap/policy/maxplus.py",
        text="if j >= buffers or j + buffers < streamed]",
        replacement="if j >= buffers or j + buffers <= streamed]",
        breaks="A layer that has a ring buffer to itself is taken to be copied in every pass (off by one).",
        tests=("test_schedule.py::test_uniform_and_slots",),
    ),
    Mutant(
        name="schedule-end-of-pass-is-forgotten",
        file="src/remap/policy/maxplus.py",
        text="math.fsum((*compute[layers[-1] + 1 :], *compute[: layers[0]]))",
        replacement="math.fsum(compute[: layers[0]])",
        breaks="The computation behind the last streamed layer hides nothing of the next pass's first copy.",
        tests=("test_schedule_properties.py::test_period_is_the_simulated_one",),
    ),
    Mutant(
        name="schedule-delay-of-the-last-layer",
        file="src/remap/policy/schedule.py",
        text="delay = max(delay, loaded - before)",
        replacement="delay = loaded - before",
        breaks="A load delays a pass by what the last missing layer waits, not by the longest wait (a lost `max`).",
        tests=("test_schedule_properties.py::test_one_shot_delay_is_the_simulated_one",),
    ),
    Mutant(
        name="schedule-growing-swaps-layers",
        file="src/remap/memory/state.py",
        text="return tuple(sorted((*present, *more)))",
        replacement="return tuple(sorted(order[: remapped + buffers]))",
        breaks="Growing chooses a set without the layers that stream already, so that these would have to come home.",
        tests=("test_session_growth.py::test_growth_adds_to_a_set_chosen_by_hand_and_takes_no_kv_page",),
    ),
    Mutant(
        name="schedule-slices-through-one-buffer",
        file="src/remap/memory/bounds.py",
        text="buffers = max(self._buffers)  # one slot",
        replacement="buffers = min(self._buffers)  # one slot",
        breaks="Slices are bounded for one ring buffer, through which nothing overlaps.",
        tests=(
            "test_session_slices.py::test_the_controller_grows_in_pages_of_every_layer_up_to_the_exact_bound_and_back",
        ),
    ),
    Mutant(
        name="schedule-copy-into-a-buffer-in-use",
        file="cpp/schedule/layer_schedule.cpp",
        text="if (open_[buffer] != kNone || fetched_for(buffer) != issued_) return std::nullopt;",
        replacement="if (fetched_for(buffer) != issued_) return std::nullopt;",
        breaks="The next layer is copied into a ring buffer whose layer is still being computed.",
        tests=("layer_schedule_test",),
    ),
    Mutant(
        name="schedule-reload-into-the-ring",
        file="cpp/schedule/prefetch_state.cpp",
        text="(states[reload.layer].load(std::memory_order_relaxed) & (kHeld | kFailed)) == 0",
        replacement="(states[reload.layer].load(std::memory_order_relaxed) & kFailed) == 0",
        breaks="A layer that comes home is loaded before its region shows its own pages: the bytes go into the ring.",
        tests=("prefetcher_test",),
    ),
    Mutant(
        name="schedule-bound-of-a-layer-too-many",
        file="src/remap_serve/policy/offline.py",
        text="link = copied + self.layers * self._loads(mix)",
        replacement="link = copied + (self.layers + 1) * self._loads(mix)",
        breaks="The bound counts the blocks of a layer that no pass copies, so that the best division may be left out.",
        tests=("test_offline_ratio.py::test_a_pass_takes_what_the_prefetchers_order_gives_and_no_less_than_its_bound",),
    ),
    Mutant(
        name="schedule-range-loads-more",
        file="src/remap_serve/policy/hybrid.py",
        text="keys = [each - count for each, count in zip(blocks, many, strict=True)]",
        replacement="keys = [each - count for each, count in zip(blocks, few, strict=True)]",
        breaks="The bound of a range of ratios is that of the end that loads most, so that the best one may be left out.",
        tests=("test_hybrid.py::test_no_ratio_of_a_range_loads_or_makes_less_than_its_bound",),
    ),
    Mutant(
        name="schedule-offline-stores-hidden",
        file="src/remap_serve/policy/offline.py",
        text="return passed + self._stores(mix)",
        replacement="return passed",
        breaks="The pass is certified without the copies out that its copies in come behind.",
        tests=("test_offline_ratio.py::test_a_pass_takes_what_the_prefetchers_order_gives_and_no_less_than_its_bound",),
    ),
    Mutant(
        name="schedule-offline-one-request-fewer",
        file="src/remap_serve/policy/offline.py",
        text="if used > room.host_bytes:",
        replacement="if used >= room.host_bytes:",
        breaks="A request that just fits into host memory is not counted, so that a ratio is taken for worse than it is.",
        tests=("test_offline_ratio.py::test_link_processor_or_host_memory_whichever_is_scarce_decides",),
    ),
    Mutant(
        name="schedule-tie-goes-to-kv",
        file="src/remap_serve/policy/activations.py",
        text="[(2 * wanted * each + every) // (2 * every) for each in blocks]",
        replacement="[(2 * wanted * each + every - 1) // (2 * every) for each in blocks]",
        breaks="The closed form rounds a half down, so that requests keep another ratio than block by block.",
        tests=("test_hybrid.py::test_blocks_keep_the_ratio_one_by_one",),
    ),
    # -- controller: how much, when, and when back --------------------------------------------------------------------------
    Mutant(
        name="controller-low-watermark-ignored",
        file="src/remap/policy/controller.py",
        text="deficit = blocks + headroom - view.free_blocks",
        replacement="deficit = blocks - view.free_blocks",
        breaks="Growing begins only when blocks are lacking, not when fewer than the low watermark are free.",
        tests=("test_controller.py::test_what_it_grows_by",),
    ),
    Mutant(
        name="controller-shrinks-without-its-loss",
        file="src/remap/policy/controller.py",
        text="holds = view.free_blocks >= demand + headroom + _lost(view, alpha - fewer) + sigma",
        replacement="holds = view.free_blocks >= demand + headroom + sigma",
        breaks="A layer comes home although the blocks that it takes along are needed.",
        tests=("test_controller.py::test_credit_is_forfeited_when_the_condition_fails",),
    ),
    Mutant(
        name="controller-guard-without-hysteresis",
        file="src/remap/policy/controller.py",
        text="self._guard.arm(view.live_blocks + demand + sigma, headroom)",
        replacement="self._guard.arm(view.live_blocks + demand, headroom)",
        breaks="After a shrink any rise of demand, however small, brings the full headroom back, and with it the growth.",
        tests=("test_controller.py::test_a_rise_within_sigma_does_not_end_the_guard",),
    ),
    Mutant(
        name="controller-rise-over-the-past",
        file="src/remap/policy/watermark.py",
        text="if tops[0][0] < seen - self._horizon:",
        replacement="if tops[0][0] < seen - self._horizon - 1:",
        breaks="What was wanted before a step counts as a rise after it: the horizon begins too early (off by one).",
        tests=("test_watermark.py::test_a_full_default_window",),
    ),
    Mutant(
        name="controller-free-pages-of-an-old-epoch",
        file="src/remap/memory/apply.py",
        text="return object() if self._due or self.draft.plans else self.arena.epoch",
        replacement="return self.arena.epoch",
        breaks="Free pages are remembered within a change and until it is settled, and are given away twice.",
        tests=("test_museum_calls.py::test_free_pages_are_counted_anew_within_a_change_and_until_it_is_settled",),
    ),
    Mutant(
        name="controller-streams-before-decode",
        file="src/remap/memory/view.py",
        text="seen=tenant.unseen is None and not (demand.can_wait and tenant.timing.early),",
        replacement="seen=tenant.unseen is None,",
        breaks="A first burst of prompts hides copies that no decode pass hides: every later pass waits.",
        tests=("test_museum_torch.py::test_nothing_is_streamed_before_a_whole_pass_was_seen",),
    ),
    Mutant(
        name="controller-waits-for-decode-for-ever",
        file="src/remap/memory/timing.py",
        text='(last is None or last[0] != "decode") and len(self._prompts) < _PROMPTS',
        replacement='(last is None or last[0] != "decode")',
        breaks="An engine that never decodes gets none of its tenant's layers while anything runs.",
        tests=("test_cost.py::test_until_a_decode_pass_comes_the_shortest_prefill_stands_in",),
    ),
    Mutant(
        name="controller-donated-pages-not-taken",
        file="src/remap/memory/step.py",
        text="            blocks += take.blocks",
        replacement="            blocks += 0",
        breaks="What other tenants give becomes free pages, and nobody takes them.",
        tests=("test_sharing_controller.py::test_free_pages_then_unused_kv_then_inactive_by_policy_then_active",),
    ),
    Mutant(
        name="controller-free-pages-by-number",
        file="src/remap/memory/view.py",
        text="return changes.draft.first_free(tenant.donation_lookup, most)",
        replacement="return [page for page in changes.arena.free_pages() if page in tenant.index_of][:most]",
        breaks="Free pages are taken by their numbers, so blocks that straddle pages have no neighbours.",
        tests=("test_sharing_controller.py::test_free_pages_are_taken_where_blocks_stand_together",),
    ),
    Mutant(
        name="controller-return-without-guard",
        file="src/remap/memory/step.py",
        text="holder.controller.has_lost(self._view(holder), holder.demand.blocks if holder.demand else 0)",
        replacement="pass",
        breaks="A holder's headroom asks back the layer that it has just given back.",
        tests=("test_sharing_returns.py::test_headroom_that_rose_since_does_not_ask_back_what_a_holder_gave",),
    ),
    # -- block pool: which blocks may be used ---------------------------------------------------------------------------------
    Mutant(
        name="pool-block-counted-twice",
        file="cpp/core/block_pool.cpp",
        text="for (BlockId block = std::max(first, next); block < end; ++block) visit(block);",
        replacement="for (BlockId block = first; block < end; ++block) visit(block);",
        breaks="A block between two pages that are given in one call becomes usable twice.",
        tests=("block_pool_test",),
    ),
    Mutant(
        name="pool-usable-before-its-last-page",
        file="cpp/core/block_pool.cpp",
        text="const std::size_t last = ((block + std::size_t{1}) * shape_.unit_bytes - 1) / shape_.page_bytes;",
        replacement="const std::size_t last = first;",
        breaks="A block that straddles two pages is usable when only the first of them is owned.",
        tests=("block_pool_test",),
    ),
    Mutant(
        name="pool-usable-before-all-ranges",
        file="cpp/core/block_pool.cpp",
        text="[this](std::size_t column) { return now_.absent[column] != 0; }",
        replacement="[this](std::size_t column) { return now_.absent[column] == shape_.ranges; }",
        breaks="In the layer_major layout a block is usable when the pages of one layer are owned.",
        tests=("block_pool_test",),
    ),
    Mutant(
        name="pool-draining-blocks-overlooked",
        file="cpp/core/block_pool.cpp",
        text="bool BlockPool::is_used(Block state) const noexcept { return state == Block::live || state == Block::draining; }",
        replacement="bool BlockPool::is_used(Block state) const noexcept { return state == Block::live; }",
        breaks="Withdrawn blocks that are still live do not keep their pages from being taken.",
        tests=("block_pool_test",),
    ),
    Mutant(
        name="pool-undo-forgets-pages",
        file="cpp/core/block_pool.cpp",
        text="  now_ = saved;\n",
        replacement="  now_.blocks = saved.blocks;\n",
        breaks="Undoing a change puts the blocks back, and not the pages that they lie on.",
        tests=("block_pool_test",),
    ),
    Mutant(
        name="pool-pages-for-blocks-rounded-down",
        file="src/remap/kv/spec.py",
        text="return -(-blocks * self.unit_bytes // self.page_bytes) * self.ranges",
        replacement="return blocks * self.unit_bytes // self.page_bytes * self.ranges",
        breaks="Too few pages are counted for blocks that do not fill their last page.",
        tests=("test_kv.py::test_giving_order",),
    ),
    Mutant(
        name="pool-moves-copy-backwards",
        file="src/remap/kv/cache.py",
        text="(at + new * unit, at + old * unit, count * unit)",
        replacement="(at + old * unit, at + new * unit, count * unit)",
        breaks="A live block that moves is overwritten with the bytes of the free block that it moves to.",
        tests=("test_session_growth.py::test_another_set_of_the_same_size_needs_no_free_block",),
    ),
    Mutant(
        name="pool-host-blocks-go-one-by-one",
        file="src/remap/kv/host.py",
        text="        self.books = marked(self.books, self.checked(ids), _FREE)\n",
        replacement=(
            "        for block in self.checked(ids):\n            self.books = marked(self.books, [block], _FREE)\n"
        ),
        breaks="An interrupt when host blocks are given back leaves some of them in use, and nobody knows which (fault 03).",
        tests=("test_interrupts.py::test_books_of_host_blocks_at_every_line",),
    ),
    # -- engine: an interrupt between two lines loses no request and no KV ------------------------------------------------------
    Mutant(
        name="engine-a-finish-that-was-interrupted-is-refused",
        file="src/remap_serve/engine/due.py",
        text="            if pool.holds(blocks):\n                pool.free(blocks)\n",
        replacement="            pool.free(blocks)\n",
        breaks="A request whose blocks the pool had back when an interrupt came can never be finished (fault 04).",
        tests=(
            "test_engine_scheduler.py::test_finishing_again_after_an_interrupt_finishes",
            "test_engine_interrupts.py::test_the_scheduler_goes_on_after_an_interrupt_at_any_line[1]",
        ),
    ),
    Mutant(
        name="engine-a-request-is-nowhere",
        file="src/remap_serve/engine/scheduler.py",
        text="        sequence, state, ticket = self._moving\n",
        replacement="        (sequence, state, ticket), self._moving = self._moving, None\n",
        breaks="An interrupt between two queues leaves a request in none of them.",
        tests=("test_engine_interrupts.py::test_the_scheduler_goes_on_after_an_interrupt_at_any_line[1]",),
    ),
    Mutant(
        name="engine-due-host-blocks-are-forgotten",
        file="src/remap_serve/engine/due.py",
        text="            self.ids = [], hosts\n",
        replacement="            self.ids = [], []\n",
        breaks="An interrupt between blocks and the host blocks that they showed loses the latter.",
        tests=("test_engine_interrupts.py::test_an_offline_batch_goes_on_after_an_interrupt_at_any_line[1]",),
    ),
    Mutant(
        name="engine-pairs-go-out-twice",
        file="src/remap_serve/engine/throughput.py",
        text="            if not pair.host:\n                pair.host",
        replacement="            if True:\n                pair.host",
        breaks="A pair that was copied out when an interrupt came is copied out again, and its first host blocks are lost.",
        tests=("test_engine_interrupts.py::test_an_offline_batch_goes_on_after_an_interrupt_at_any_line[1]",),
    ),
    Mutant(
        name="engine-a-turn-is-over-while-it-gets-its-blocks",
        file="src/remap_serve/engine/sharing.py",
        text="self._idle_turn = not gets and ",
        replacement="self._idle_turn = ",
        breaks="A turn ends in its first round, before the blocks that others give it are there: its requests wait for good.",
        tests=("test_waits.py",),
    ),
    Mutant(
        name="engine-who-has-begun-waits-for-all-older-ones",
        file="src/remap_serve/engine/engine.py",
        text="            scheduler.put_first(late)\n",
        replacement="",
        breaks="A request that has begun and lost its blocks waits until older ones have ended, however long they run.",
        tests=("test_waits.py",),
    ),
    Mutant(
        name="engine-who-goes-first-finds-no-room",
        file="src/remap_serve/engine/engine.py",
        text="self.release(sum(scheduler.blocks_for(one.length + 1) for one in late) - self._kv.free_blocks)",
        replacement="pass",
        breaks="A request that goes first waits at the head of the queue, since nobody gives it blocks.",
        tests=("test_waits.py",),
    ),
    Mutant(
        name="engine-guests-take-back-what-they-gave",
        file="src/remap_serve/engine/guests.py",
        text="        guest.scheduler.closed = True\n",
        replacement="",
        breaks="A guest that gave blocks lets its requests back in at once, and takes them again: KV goes to and fro.",
        tests=(
            "test_guests.py::test_the_guest_whose_turn_is_furthest_gives_and_lets_nobody_in_for_the_rest_of_the_turn",
        ),
    ),
    Mutant(
        name="engine-guests-stay-closed",
        file="src/remap_serve/engine/guests.py",
        text="            engine.scheduler.closed = False\n",
        replacement="            pass\n",
        breaks="Who gave blocks in one turn lets no request in any more.",
        tests=("test_guests.py::test_epochs_go_on_after_an_interrupt_at_any_line[0]",),
    ),
    Mutant(
        name="engine-guests-compute-without-their-layers",
        file="src/remap_serve/engine/guests.py",
        text="not internals(self._engines[name].tenant).away_pages\n",
        replacement="True\n",
        breaks="A tenant whose layers others have becomes a guest: its layers come home in another's turn, and take its memory.",
        tests=("test_guests.py::test_who_has_work_and_its_layers_is_a_guest_until_it_has_none",),
    ),
    Mutant(
        name="engine-a-lost-token-is-not-computed-again",
        file="src/remap_serve/engine/engine.py",
        text="                sequence.computed -= 1\n",
        replacement="                pass\n",
        breaks="A request whose token an interrupt lost has nothing to compute, and waits for ever.",
        tests=("test_engine_interrupts.py::test_the_loop_goes_on_after_an_interrupt_at_any_line[0]",),
    ),
    # -- lending: pages between tenants, all or nothing -----------------------------------------------------------------------
    Mutant(
        name="lending-holder-is-not-given-back",
        file="cpp/core/draft.cpp",
        text="    for (auto& [pool, saved] : inner.pools) keep(*pool, std::move(saved));\n",
        replacement="",
        breaks="When bringing layers home fails, a holder does not get back the blocks that it had given up (a lost undo).",
        tests=("draft_pools_test",),
    ),
    Mutant(
        name="pool-has-a-page-before-it-is-zeroed",
        file="cpp/core/draft.cpp",
        text="if (pool == nullptr || late || slot",
        replacement="if (pool == nullptr || slot",
        breaks="Blocks move to a page that another tenant gave up in the same change, and are zeroed there.",
        tests=("draft_pools_test",),
    ),
    Mutant(
        name="pool-pages-go-before-others-come",
        file="cpp/core/draft.cpp",
        text="share.pool->usable_with(share.lost, share.gained)",
        replacement="share.pool->usable_with(share.lost, {})",
        breaks="A change is refused, since the room that it brings does not count.",
        tests=("draft_pools_test",),
    ),
    Mutant(
        name="lending-page-promised-twice",
        file="src/remap/memory/lend.py",
        text="            taken.update(free[:least])\n",
        replacement="",
        breaks="Two holders count on the same free page for the blocks that have to move.",
        tests=("test_sharing_returns.py::test_who_is_in_the_way_of_an_activation_is_named_and_freeing_it_is_enough",),
    ),
    Mutant(
        name="lending-a-refused-place-brings-layers-home",
        file="src/remap/memory/place.py",
        text="        with changes.part():\n",
        replacement="        if True:\n",
        breaks="A place that is refused has brought lent layers home before (fault 01).",
        tests=("test_place.py::test_a_place_that_is_refused_leaves_lent_layers_where_they_are",),
    ),
    Mutant(
        name="lending-slices-come-home-as-layers",
        file="src/remap/memory/step.py",
        text="lender.streaming_at(fewer, buffers, self._homewards(lender, fewer, buffers))",
        replacement='lender.streaming_at(fewer, buffers, "inward")',
        breaks="Of a tenant that lent and then streams slices, some come home, the others only when it serves again (fault 02).",
        tests=("test_lending.py::test_a_tenant_that_lent_and_then_streams_slices_brings_them_home_together",),
    ),
    Mutant(
        name="schedule-share-of-a-layer-without-pages",
        file="src/remap/memory/state.py",
        text="each * (tail / size) if tail else 0.0 for each",
        replacement="each * (tail / size) for each",
        breaks="Beside layers that are elsewhere, what streams is divided by their pages, of which there are none (fault 05).",
        tests=("test_place.py::test_slices_stream_beside_layers_that_are_elsewhere",),
    ),
    Mutant(
        name="lending-holder-inside-a-pass",
        file="src/remap/memory/lend.py",
        text="            holder.require_idle()",
        replacement="            pass",
        breaks="Pages are taken from a holder whose pass may be reading them.",
        tests=("test_lending.py::test_a_holder_inside_a_pass_keeps_its_pages",),
    ),
    Mutant(
        name="lending-failed-attach-keeps-its-pages",
        file="src/remap/memory/attach.py",
        text="self._arena.remove_tenant(arrival.number, undoing=True)",
        replacement="pass",
        breaks="An attach that failed keeps the pages and addresses that it had taken (a claim that is not released).",
        tests=("test_museum_bytes.py::test_a_failed_attach_does_not_leave_its_weights_to_the_next_tenant",),
    ),
    Mutant(
        name="executor-idle-lenders-are-re-pointed",
        file="src/remap/memory/apply.py",
        text="asleep = self._deferring and not tenant.active",
        replacement="asleep = False",
        breaks="Each turn re-points all layers that it borrows, and back: seconds of driver calls that nobody needs.",
        tests=("test_lending.py::test_who_is_idle_lends_and_gets_its_layers_back_without_a_call_of_the_driver",),
    ),
    Mutant(
        name="lending-switches-take-nothing-of-the-link",
        file="src/remap/memory/shared_link.py",
        text="tuple(each / (1.0 - share) for each in times.transfer_s)",
        replacement="times.transfer_s",
        breaks="Who streams beside switches is certified as if it had the whole link: its passes wait behind what comes back.",
        tests=("test_switching.py::test_a_tenant_has_the_rest_of_the_link",),
    ),
    Mutant(
        name="lending-streams-whatever-that-costs",
        file="src/remap_serve/engine/sharing.py",
        text="default = False if self._prepares else PARTIAL",
        replacement="default = not self._prepares",
        breaks="A turn's passes stream whole layers over a slow link for as long as others' blocks live.",
        tests=("test_switching.py::test_passes_do_not_spend_turns_waiting_over_a_slow_link[remap:weights-0.25]",),
    ),
    Mutant(
        name="lending-streams-less-than-it-may",
        file="src/remap/memory/activate.py",
        text="    for remapped in range(_alpha(tenant), keep, -1):",
        replacement="    for remapped in range(_alpha(tenant) - 1, keep, -1):",
        breaks="A waking tenant is refused although all that is away now could be streamed within its caller's share.",
        tests=("test_sharing_controller.py::test_a_waking_tenant_streams_as_much_as_its_caller_allows",),
    ),
    Mutant(
        name="lending-one-willing-holder-is-enough",
        file="src/remap/memory/step.py",
        text="holds = all(blocks <= self._offers.unused_kv.surplus(holder) for holder, blocks in lost.items())",
        replacement="holds = any(blocks <= self._offers.unused_kv.surplus(holder) for holder, blocks in lost.items())",
        breaks="A layer comes home although one of its holders needs the blocks in it.",
        tests=("test_sharing_returns.py::test_a_layer_stays_while_one_of_its_holders_needs_it",),
    ),
    Mutant(
        name="lending-return-beside-a-pass",
        file="src/remap/memory/step.py",
        text="        if any(holder.busy for holder in lost):\n            return\n",
        replacement="",
        breaks="A step asks for pages of a holder that is inside a pass, and raises.",
        tests=("test_sharing_returns.py::test_a_layer_waits_for_the_pass_of_its_holder",),
    ),
    Mutant(
        name="lending-layers-away-unnoticed",
        file="src/remap/memory/apply.py",
        text="                tenant.all_ready = False\n",
        replacement="",
        breaks="A tenant says that nothing streams, so an engine replays a graph of the whole pass over the ring.",
        tests=("test_session_growth.py::test_who_asks_hears_at_once_that_layers_are_away",),
    ),
    Mutant(
        name="executor-copy-across-pieces",
        file="cpp/backend/cuda/cuda.cpp",
        text="      if (from_locked) some = std::min(some, locked_->piece_at(copy.from + at));\n",
        replacement="",
        breaks="A copy lies in two page-locked pieces, which the driver refuses.",
        tests=("cuda_stream_test",),
    ),
    Mutant(
        name="executor-failed-batch-runs-on",
        file="cpp/backend/cuda/stream.cpp",
        text="const bool ended = driver_.cuStreamSynchronize(stream) == result::kSuccess;",
        replacement="const bool ended = true;",
        breaks="The caller hears that a batch has failed while copies of it still write.",
        tests=("cuda_fault_test",),
    ),
    # -- executor: owners, mappings and zeroes, whole or undone whole ------------------------------------------------------------
    Mutant(
        name="executor-page-passes-for-clean",
        file="cpp/core/executor.cpp",
        text="if (page.dirty == kNobody) page.dirty = wrote;",
        replacement="page.dirty = wrote;",
        breaks="A page that comes from another tenant passes for the new one's own, and is not zeroed.",
        tests=("executor_change_test",),
    ),
    Mutant(
        name="executor-zeroes-come-too-early",
        file="cpp/core/executor.cpp",
        text="    if (after != 0) arena.gather(after);",
        replacement="    static_cast<void>(after);",
        breaks="A page is zeroed before its former tenant's last writes have come, which then reach the next tenant.",
        tests=("executor_zeroing_test",),
    ),
    Mutant(
        name="executor-what-is-due-is-zeroed-at-once",
        file="cpp/core/executor.cpp",
        text="const bool was_free = !from_others && next.owner == Owner::kv;",
        replacement="const bool was_free = next.owner == Owner::kv;",
        breaks="A page goes from one tenant to another, and is zeroed before the first one's live blocks have moved out of it.",
        tests=("executor_change_test",),
    ),
    Mutant(
        name="executor-strict-shows-what-is-given",
        file="cpp/core/executor.cpp",
        text="shown_still_.emplace_back(id, slot);",
        replacement="static_cast<void>(slot);",
        breaks="A stray access to KV that its tenant has given up reaches another tenant's bytes, in strict mode too.",
        tests=("executor_change_test",),
    ),
    Mutant(
        name="executor-draft-forgets-who-had-a-page",
        file="cpp/core/draft.cpp",
        text="now.passed = now.passed == kNobody || now.passed == before ? before : kUnknownBytes;",
        replacement="static_cast<void>(kUnknownBytes);",
        breaks="A page passes through another tenant's hands within a change, and shows its next tenant what lies there.",
        tests=("executor_change_test",),
    ),
    Mutant(
        name="executor-draft-keeps-what-is-dropped",
        file="cpp/core/draft.cpp",
        text="  forget();\n  for (std::size_t at = 0",
        replacement="  for (std::size_t at = 0",
        breaks="A plan that was tried and dropped is carried out.",
        tests=("executor_change_test",),
    ),
    Mutant(
        name="pool-moves-that-fail-are-forgotten",
        file="src/remap/kv/cache.py",
        text="            self.move(self.due_moves[0])\n            self.due_moves = self.due_moves[1:]\n",
        replacement="            due, self.due_moves = self.due_moves[0], self.due_moves[1:]\n            self.move(due)\n",
        breaks="A move of live blocks fails once, and their next reader finds other bytes.",
        tests=("test_change_parts.py::test_moves_that_fail_are_made_before_anything_reads_the_blocks",),
    ),
    Mutant(
        name="executor-not-looked-at-again",
        file="cpp/core/executor.cpp",
        text="    admit(draft);  // another change may have been faster",
        replacement="",
        breaks="A plan that waited without the lock is carried out although another plan came first.",
        tests=("executor_stream_test",),
    ),
    Mutant(
        name="executor-pages-leave-early",
        file="cpp/core/executor.cpp",
        text="  if (needs.leaves) {",
        replacement="  if (false && needs.leaves) {",
        breaks="A page goes to another process while zeroes for it are still to come.",
        tests=("shared_pages_test",),
    ),
    Mutant(
        name="executor-undecided-is-pointed",
        file="cpp/core/executor_worker.cpp",
        text="if (found->second.undecided) return Standing::undecided;",
        replacement="",
        breaks="The step of an earlier change lets a layer go before the next one, which sends it elsewhere, is committed.",
        tests=("executor_stream_test", "executor_worker_test"),
    ),
    Mutant(
        name="executor-old-steps-come-again",
        file="cpp/core/executor_worker.cpp",
        text="return found->second.targets == job.targets ? Standing::present : Standing::past;",
        replacement="return Standing::present;",
        breaks="A step that another plan took over still comes, and re-points its layer under work that uses it.",
        tests=("executor_worker_test",),
    ),
    Mutant(
        name="executor-mapping-noted-too-late",
        file="cpp/core/pointing.cpp",
        text="      mapped.emplace_back(first, count);\n"
        "      backend.set_access(at, count * page_bytes, Access::read_write);\n",
        replacement="      backend.set_access(at, count * page_bytes, Access::read_write);\n"
        "      mapped.emplace_back(first, count);\n",
        breaks="Pages stay mapped, unknown to the tables, when access to them cannot be set (the wrong order of two steps).",
        tests=("executor_test",),
    ),
    Mutant(
        name="executor-one-view-is-not-put-back",
        file="cpp/core/arena.cpp",
        text="while (unmapped-- > 0) {",
        replacement="while (unmapped-- > 1) {",
        breaks="When a tenant cannot be removed, one of its regions stays unmapped (off by one).",
        tests=("arena_test",),
    ),
)


# -- judging ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a command has ended. code: its exit code, None if it had to be ended after its time."""

    code: int | None
    output: str


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant. detail: why, where that is not obvious."""

    outcome: str
    detail: str = ""
    seconds: float = 0.0


class CannotRun(Exception):
    """The tests cannot be run at all; the text says why."""


def mutated(source: str, mutant: Mutant) -> str | None:
    """The file's text with the mutant in it; None if the mutant does not apply."""
    return source.replace(mutant.text, mutant.replacement) if source.count(mutant.text) == 1 else None


def judge_pytest(ended: Ended) -> Verdict:
    """pytest exits with 1 if tests failed. 2 to 5 say that they could not be run, which kills nothing."""
    return _judged(ended, 1)


def judge_ctest(ended: Ended) -> Verdict:
    """ctest exits with 8 if tests failed."""
    return _judged(ended, 8)


def _judged(ended: Ended, failed: int) -> Verdict:
    if ended.code is None:
        return Verdict(KILLED, f"no end within {TIMEOUT_S:g} s")
    if ended.code == failed:
        return Verdict(KILLED)
    if ended.code == 0:
        return Verdict(SURVIVED)
    return Verdict(NOT_JUDGED, f"exit code {ended.code}\n{_tail(ended.output)}")


def _tail(output: str) -> str:
    return "\n".join(f"    {line}" for line in output.splitlines()[-SHOWN_LINES:])


# -- running -----------------------------------------------------------------------------------------------------------------

# Loaded by pytest in the copy. Nothing may be judged by tests of other sources than the copy's, nor by a mutant that cannot be
# imported; and a mutant is to be killed in every run or in none.
PLUGIN = """
import importlib, os

def pytest_configure(config):
    from hypothesis import Phase, settings
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate)
    )
    settings.load_profile("mutants")
    for name in os.environ["REMAP_MUTANTS_MODULES"].split():
        module = importlib.import_module(name)
        if not os.path.realpath(module.__file__).startswith(os.environ["REMAP_MUTANTS_SOURCES"] + os.sep):
            raise RuntimeError(f"{name} was imported from {module.__file__}, not from the copy")
"""


def run(command: Sequence[str], cwd: Path, env: dict[str, str], timeout_s: float) -> Ended:
    """Run a command to its end, or end it and all that it has started."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would be kept open by what it has started
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        code: int | None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return Ended(code, output.read())


def tracked_files() -> list[str]:
    """The repository's tracked files that are there."""
    try:
        found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRun(f"git cannot list the tracked files of {ROOT}: {error}") from error
    return [name for name in found.stdout.split("\0") if name and (ROOT / name).is_file()]


def compiled_core() -> Path:
    """The compiled `remap._core` of the Python that runs this."""
    found = subprocess.run(
        [sys.executable, "-c", "import remap._core as core; print(core.__file__)"],
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise CannotRun(f"{sys.executable} cannot import remap._core; install remap for it first\n{found.stderr}")
    return Path(found.stdout.strip())


class Copy:
    """A copy of the tracked files, in which mutants are tried one after the other."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.folder = folder.resolve()
        for name in files:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        # No settings of the caller's own. No byte code: two mutants written within a second may have one size.
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("REMAP_", "PYTEST_"))}
        self.env |= {
            "REMAP_TEST_LONG": "1",  # whoever tries fewer cases may miss one
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self.folder / "src"),
        }

    @contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[bool]:
        """The mutant is in the copy, meanwhile. False if it does not apply."""
        path = self.folder / mutant.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        changed = mutated(source, mutant)
        if changed is None:
            yield False
            return
        path.write_text(changed, encoding="utf-8")
        try:
            yield True
        finally:
            path.write_text(source, encoding="utf-8")

    # -- Python

    def add_core(self, core: Path) -> None:
        """Put the compiled core beside the copy's Python sources."""
        shutil.copyfile(core, self.folder / "src" / "remap" / core.name)
        (self.folder / "src" / "remap_mutants_plugin.py").write_text(PLUGIN, encoding="utf-8")

    def pytest(self, mutants: Sequence[Mutant], *options: str, timeout_s: float = TIMEOUT_S) -> Ended:
        """The tests of these mutants."""
        folders = {
            path.name: path.parent
            for suite in ("python", "serve")
            for path in (self.folder / "tests" / suite).glob("test_*.py")
        }
        named = (test for mutant in mutants for test in mutant.tests)
        tests = dict.fromkeys(str(folders[test.partition("::")[0]] / test) for test in named)
        modules = dict.fromkeys(("remap._core", *(mutant.module for mutant in mutants)))
        env = self.env | {
            "REMAP_MUTANTS_MODULES": " ".join(modules),
            "REMAP_MUTANTS_SOURCES": str(self.folder / "src"),
        }
        plugins = ("-p", "remap_mutants_plugin", "-p", "no:cacheprovider")
        command = (sys.executable, "-m", "pytest", "-q", *plugins, *options, *tests)
        return run(command, self.folder, env, timeout_s)

    # -- C++

    def configure(self) -> Ended:
        """Prepare a build of the C++ tests."""
        options = ("-DREMAP_BUILD_TESTS=ON", "-DREMAP_BUILD_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Debug")
        flags = "-DCMAKE_CXX_FLAGS_DEBUG=-O1"
        command = ("cmake", "-S", ".", "-B", "build/cpp", "-G", "Ninja", *options, flags)
        return run(command, self.folder, self.env, BUILD_TIMEOUT_S)

    def build(self, mutants: Sequence[Mutant], jobs: int) -> Ended:
        """Build the tests of these mutants, as far as they have to be."""
        targets = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        command = ("cmake", "--build", "build/cpp", "--parallel", str(jobs), "--target", *targets)
        return run(command, self.folder, self.env, BUILD_TIMEOUT_S)

    def ctest(self, mutants: Sequence[Mutant], timeout_s: float = TIMEOUT_S) -> Ended:
        """Run the tests of these mutants."""
        names = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        command = ("ctest", "--test-dir", "build/cpp", "--no-tests=error", "--output-on-failure", "-R")
        return run((*command, f"^({'|'.join(names)})$"), self.folder, self.env, timeout_s)


def try_python(copy: Copy, mutant: Mutant) -> Verdict:
    """Whether this mutant of a Python source is killed."""
    with copy.with_mutant(mutant) as applies:
        return judge_pytest(copy.pytest([mutant], "-x")) if applies else Verdict(GONE)


def try_cpp(copy: Copy, mutant: Mutant, jobs: int) -> Verdict:
    """Whether this mutant of a C++ source is killed."""
    with copy.with_mutant(mutant) as applies:
        if not applies:
            return Verdict(GONE)
        built = copy.build([mutant], jobs)
        if built.code != 0:
            return Verdict(NOT_JUDGED, f"it does not compile\n{_tail(built.output)}")
        return judge_ctest(copy.ctest([mutant]))


class Report:
    """Prints verdicts as they come."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self.count = len(mutants)
        self.verdicts: dict[str, Verdict] = {}

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        """Print one verdict."""
        self.verdicts[mutant.name] = verdict
        line = f"[{len(self.verdicts)}/{self.count}] {verdict.outcome:<10} {mutant.name} ({verdict.seconds:.1f} s)"
        if verdict.outcome != KILLED:
            line += f"\n  {mutant.file}: {mutant.breaks}\n  tests: {', '.join(mutant.tests)}"
        print(line + (f"\n  {verdict.detail}" if verdict.detail else ""), flush=True)

    def summary(self) -> int:
        """Print the numbers. Returns the exit code."""
        outcomes = [verdict.outcome for verdict in self.verdicts.values()]
        counts = {outcome: outcomes.count(outcome) for outcome in (KILLED, SURVIVED, GONE, NOT_JUDGED)}
        print(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
        return 0 if counts[KILLED] == self.count else 1


def control(ended: Ended, what: str) -> None:
    """Raise CannotRun unless this went well without any mutant."""
    if ended.code != 0:
        code = "it did not end in time" if ended.code is None else f"exit code {ended.code}"
        raise CannotRun(f"without any mutant: {what} failed ({code})\n{_tail(ended.output)}")


def run_cpp(folder: Path, files: Sequence[str], mutants: Sequence[Mutant], jobs: int, report: Report) -> None:
    """All mutants of C++ sources, in one copy: what is built once need not be built again."""
    copy = Copy(folder / "cpp", files)
    begin = time.monotonic()
    control(copy.configure(), "configuring")
    control(copy.build(mutants, jobs), "building")
    control(copy.ctest(mutants, TIMEOUT_S * len(mutants)), "ctest")
    print(f"C++ tests pass without any mutant ({time.monotonic() - begin:.1f} s)", flush=True)
    for mutant in sorted(mutants, key=lambda each: each.file):
        begin = time.monotonic()
        verdict = try_cpp(copy, mutant, jobs)
        report.add(mutant, Verdict(verdict.outcome, verdict.detail, time.monotonic() - begin))


def run_python(folder: Path, files: Sequence[str], mutants: Sequence[Mutant], jobs: int, report: Report) -> None:
    """All mutants of Python sources, `jobs` at a time, each in a copy of its own."""
    core = compiled_core()
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for index in range(min(jobs, len(mutants))):
        copy = Copy(folder / f"python{index}", files)
        copy.add_core(core)
        copies.put(copy)
    begin = time.monotonic()
    control(copy.pytest(mutants, timeout_s=TIMEOUT_S * len(mutants)), "pytest")
    print(f"Python tests pass without any mutant ({time.monotonic() - begin:.1f} s)", flush=True)

    def one(mutant: Mutant) -> tuple[Mutant, Verdict]:
        mine = copies.get()
        begin = time.monotonic()
        try:
            verdict = try_python(mine, mutant)
        finally:
            copies.put(mine)
        return mutant, Verdict(verdict.outcome, verdict.detail, time.monotonic() - begin)

    with ThreadPoolExecutor(jobs) as pool:
        for mutant, verdict in pool.map(one, mutants):
            report.add(mutant, verdict)


def selected(pattern: str | None) -> list[Mutant]:
    """Mutants whose name or file contains the pattern, or matches it (*, ?)."""
    if pattern is None:
        return list(MUTANTS)
    return [
        mutant
        for mutant in MUTANTS
        if any(pattern in text or fnmatch.fnmatchcase(text, pattern) for text in (mutant.name, mutant.file))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Do the tests notice these mistakes?")
    parser.add_argument("--only", metavar="PATTERN", help="mutants whose name or file contains this, or matches it")
    parser.add_argument("--list", action="store_true", help="print the mutants and what they break")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at a time (default: 1)")
    given = parser.parse_args(arguments)
    mutants = selected(given.only)
    if not mutants:
        parser.error(f"no mutant's name or file matches {given.only!r}")
    if given.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {given.jobs}")
    if given.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.file}: {mutant.breaks}\n    {', '.join(mutant.tests)}")
        return 0
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        parser.error(f"{sys.executable} has no pytest or no hypothesis")
    report = Report(mutants)
    try:
        files = tracked_files()
        with tempfile.TemporaryDirectory(prefix="remap-mutants-") as folder:
            cpp = [mutant for mutant in mutants if mutant.is_cpp]
            python = [mutant for mutant in mutants if not mutant.is_cpp]
            if python:
                run_python(Path(folder), files, python, given.jobs, report)
            if cpp:
                run_cpp(Path(folder), files, cpp, given.jobs, report)
    except CannotRun as error:
        print(error)
        return 1
    return report.summary()


if __name__ == "__main__":
    sys.exit(main())
