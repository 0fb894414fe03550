// The control calls of tests. The library exports them with C linkage; C++ tests take their types from here.
#pragma once

#include <cstdint>

#define REMAP_EMULATED_EXPORT extern "C" __attribute__((visibility("default")))

// Its presence says that a driver library is the emulated one.
REMAP_EMULATED_EXPORT int remapEmulatedVersion();

// Forgets violations, counts and injected errors, reads the environment again, and heals lost contexts and failed streams.
// What is live stays; while anything is, the granularity stays as well.
REMAP_EMULATED_EXPORT void remapEmulatedReset();

// A setting by its name (settings.h), until the next reset. 0; -1 for an unknown name or value; -2 for another granularity or
// count of devices while reservations or pages are live. Nothing is changed unless it returns 0.
REMAP_EMULATED_EXPORT int remapEmulatedConfigure(const char* name, std::uint64_t value);

// The nth call (1: the next) of this entry point returns `code` and does nothing; with `forever`, all from then on. "run:" and
// the name of a copy, fill or host function: that work fails when it runs, half done.
REMAP_EMULATED_EXPORT void remapEmulatedArm(const char* name, std::uint64_t nth, int code, int forever);
REMAP_EMULATED_EXPORT void remapEmulatedDisarm();

// Calls of one entry point since the last reset; of all for null. cuGetErrorName and cuGetErrorString are not counted.
REMAP_EMULATED_EXPORT std::uint64_t remapEmulatedCalls(const char* name);

// The names of the entry points, in order; null behind the last. One that has two versions comes twice.
REMAP_EMULATED_EXPORT const char* remapEmulatedEntryPoint(std::uint64_t index);

// Rule violations since the last reset. The text is valid until the calling thread asks again; null behind the last.
REMAP_EMULATED_EXPORT std::uint64_t remapEmulatedViolations();
REMAP_EMULATED_EXPORT const char* remapEmulatedViolation(std::uint64_t index);

// Copies whose host side was not page-locked: allowed, but a device makes their caller wait.
REMAP_EMULATED_EXPORT std::uint64_t remapEmulatedPageable();

// How many there are now of: reservations, mappings, pages, streams (without default ones), events, registrations, contexts
// (references to primary ones), work (operations that are not done), blocked (callers that wait in a call that enqueues, since their
// stream's channel is full). All bits set for an unknown kind.
REMAP_EMULATED_EXPORT std::uint64_t remapEmulatedLive(const char* kind);
