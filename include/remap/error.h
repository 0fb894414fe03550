// SPDX-License-Identifier: Apache-2.0
// Every error of the core: a kind, a sentence, and the numbers in it as fields.
//
// A message says what was expected, what was left unchanged, and what to do next. The Python bindings raise the class of
// `remap.errors` that `kind` names, with the fields as attributes; nothing ever decides by parsing the text.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace remap {

enum class ErrorKind : std::uint8_t {
  invalid_argument,
  invalid_state,
  out_of_memory,
  limit_exceeded,
  stale_plan,
  driver,
  arena_broken,
  forked_process,
};

class Error : public std::runtime_error {
 public:
  using Value = std::variant<std::int64_t, std::string>;
  using Fields = std::vector<std::pair<std::string, Value>>;

  Error(ErrorKind kind, const std::string& message, Fields fields = {})
      : std::runtime_error(message), kind_(kind), fields_(std::move(fields)) {}

  ErrorKind kind() const noexcept { return kind_; }
  const Fields& fields() const noexcept { return fields_; }

 private:
  ErrorKind kind_;
  Fields fields_;
};

}  // namespace remap
