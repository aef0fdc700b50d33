"""A check for schemathesis: what the schema allows is refused only for what no schema can say.

It takes the place of positive_data_acceptance, which wants all of it accepted. Read by schemathesis
itself (SCHEMATHESIS_HOOKS), so it imports nothing of this project. The file that
JAXSERVE_SCHEMATHESIS_LOG names gets a line "PATH STATUS CODE" for each such request.
"""

import os

import schemathesis

# docs/serving.md says what each of them means.
CODES = ("context_length_exceeded", "conflicting_fields", "invalid_structure", "template_error")
NO_TOOLS = ("unsupported_parameter", "tools")  # whether there are some, the model decides


@schemathesis.check
def refused_for_what_no_schema_says(ctx, response, case):
  if case.meta is None or not case.meta.generation.mode.is_positive:
    return
  error = {}
  if response.status_code >= 400:
    error = response.json().get("error", {})
  if log := os.environ.get("JAXSERVE_SCHEMATHESIS_LOG"):
    with open(log, "a", encoding="utf-8") as file:
      file.write(f"{case.operation.path} {response.status_code} {error.get('code')}\n")
  if response.status_code < 400 or response.status_code in (429, 503):
    return
  code, param = error.get("code"), error.get("param")
  if response.status_code != 400 or not (code in CODES or (code, param) == NO_TOOLS):
    raise AssertionError(f"the schema allows it, the answer is {response.status_code} {error}")
