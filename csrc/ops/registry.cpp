// Schemas and names of ops. Python reads the names through the op `public_functions`, and the
// numbers of the ops through `constants`.
#include "ops/registry.h"

#include <algorithm>
#include <map>

namespace omniattn::ops {
namespace {

using Functions = std::map<std::string, std::vector<PublicFunction>>;
Functions& public_functions() {
  static Functions found;
  return found;
}

std::map<std::string, int64_t>& constants() {
  static std::map<std::string, int64_t> found;
  return found;
}

// Takes a suffix off a name; false if the name does not end with it.
bool take_suffix(std::string& name, std::string_view suffix) {
  const bool found = std::string_view(name).ends_with(suffix);
  if (found) name.resize(name.size() - suffix.size());
  return found;
}

// Type in a schema of a C++ type; `written` numbers the arguments that the op writes.
std::string schema_type(std::string_view type, char& written) {
  static const std::map<std::string_view, std::string> kTypes{
      {"bool", "bool"},      {"Bools", "bool[]"},     {"double", "float"},
      {"Floats", "float[]"}, {"int64_t", "int"},      {"Ints", "int[]"},
      {"SymInt", "SymInt"},  {"SymInts", "SymInt[]"}, {"ScalarType", "ScalarType"},
      {"Tensor", "Tensor"},  {"Tensors", "Tensor[]"}, {"Output", "Tensor"},
  };
  if (type.starts_with("Opt")) return schema_type(type.substr(3), written) + '?';
  if (type == "Written") return std::string("Tensor(") + written++ + "!)";
  return kTypes.at(type);
}

// Calls f(part) for the parts of a text between separators.
template <class F>
void for_parts(std::string_view text, char separator, const F& f) {
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    const size_t first = std::min(text.find_first_not_of(' ', begin), end);
    f(text.substr(first, end - first));
    begin = end + 1;
  }
}

// Index of an argument in a schema.
size_t index_of(std::string_view schema, std::string_view argument) {
  const size_t begin = schema.find('(');
  size_t index = 0, found = std::string_view::npos;
  for_parts(schema.substr(begin + 1, schema.find(") -> ") - begin - 1), ',',
            [&](std::string_view part) {
              if (part.substr(part.find(' ') + 1) == argument) found = index;
              ++index;
            });
  require(found < index, "registry", argument, " is no argument of ", schema);
  return found;
}

}  // namespace

std::string schema_of_fields(const std::vector<std::string_view>& structs) {
  std::string schema;
  char written = 'a';
  for (const std::string_view fields : structs) {
    for_parts(fields, ';', [&](std::string_view declaration) {
      const size_t space = declaration.find(' ');
      for_parts(declaration.substr(space), ',', [&](std::string_view field) {
        const size_t end = field.find(" = {}");
        if (!schema.empty()) schema += ", ";
        schema += schema_type(declaration.substr(0, space), written) + ' ';
        schema += field.substr(0, end);
        if (end != std::string_view::npos) schema += "=None";
      });
    });
  }
  return schema;
}

OpNames::OpNames(const std::string& name, std::string_view schema) {
  std::string op = name;
  take_suffix(op, "_");
  const char* const suffix = take_suffix(op, "_backward") ? "_backward" : "";
  const auto found = public_functions().find(op);
  if (found == public_functions().end()) {
    names_.push_back({op + suffix, 0, false});
    return;
  }
  for (const PublicFunction& function : found->second) {
    const bool chosen = function.argument != nullptr;
    if (!chosen && !names_.empty()) continue;
    names_.push_back({std::string(function.name) + suffix,
                      chosen ? index_of(schema, function.argument) : 0, chosen});
  }
}

void Registry::name(const char* op, std::vector<PublicFunction> functions) {
  public_functions()[op] = std::move(functions);
}

void Registry::constant(const char* name, int64_t value) { constants()[name] = value; }

void Registry::implement_boxed(const std::string& op,
                               void (*run)(StableIValue*, uint64_t, uint64_t), Gradient gradient) {
  implementations_.impl(op.c_str(), run);
  if (gradient == Gradient::none) return;
  implementations_.impl((op + "_raw").c_str(), run);
  if (gradient == Gradient::saves_last) implementations_.impl((op + "_only").c_str(), run);
}

#if defined(OMNIATTN_CUDA)
// The CPU library registers the schemas.
void Registry::define_schema(const std::string&, Gradient) {}

}  // namespace omniattn::ops
#else
namespace {
// Schema of `<op>_raw` or of `<op>_only`.
std::string eager_schema(std::string schema, const char* suffix) {
  schema.insert(schema.find('('), suffix);
  const std::string symbols = "SymInt[]";
  const size_t at = schema.find(symbols);
  if (at != std::string::npos) schema.replace(at, symbols.size(), "int[]");
  return schema;
}
std::string without_last_result(std::string schema) {
  return schema.erase(schema.rfind(',')) + ')';
}

// One line "<op>: <function>, <function>=<argument>" for each op with names of its own.
std::string list_public_functions() {
  std::string lines;
  for (const auto& [op, functions] : public_functions()) {
    lines += op;
    const char* separator = ": ";
    for (const PublicFunction& function : functions) {
      lines.append(separator).append(function.name);
      if (function.argument != nullptr) lines.append("=").append(function.argument);
      separator = ", ";
    }
    lines += '\n';
  }
  return lines;
}

// One line "<name>: <value>" for each constant.
std::string list_constants() {
  std::string lines;
  for (const auto& [name, value] : constants()) lines += name + ": " + std::to_string(value) + '\n';
  return lines;
}
}  // namespace

void Registry::define_schema(const std::string& schema, Gradient gradient) {
  schemas_.def(schema.c_str());
  if (gradient == Gradient::none) return;
  schemas_.def(eager_schema(schema, "_raw").c_str());
  if (gradient != Gradient::saves_last) return;
  schemas_.def(without_last_result(eager_schema(schema, "_only")).c_str());
}

}  // namespace omniattn::ops

STABLE_TORCH_LIBRARY_FRAGMENT(omniattn, m) {
  m.def("public_functions() -> str");
  m.def("constants() -> str");
}
STABLE_TORCH_LIBRARY_IMPL(omniattn, CompositeExplicitAutograd, m) {
  m.impl("public_functions", TORCH_BOX(&omniattn::ops::list_public_functions));
  m.impl("constants", TORCH_BOX(&omniattn::ops::list_constants));
}
#endif
