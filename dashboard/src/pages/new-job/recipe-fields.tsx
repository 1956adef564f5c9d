import { useState } from "react";
import type { Preset } from "../../api/types";
import { EFFORT_TEXTS } from "../../labels";
import { Field } from "../../ui/basics";
import { algorithmsOf, effortOf, withAlgorithms, withValue } from "./body";
import { Choice, type Props } from "./fields";

/** The algorithms of a preset: those that are recommended for an effort, or a chain of one's own. */
export function RecipeFields(props: Props & { preset: Preset }) {
  const { body, onChange, errorAt, preset } = props;
  const own = algorithmsOf(body);
  const [text, setText] = useState(own?.join(", ") ?? "");
  const effort = effortOf(body);
  const chain = preset.recipes[effort]?.map(({ name }) => String(name)).join(", ");
  return (
    <>
      <Choice
        label="Effort"
        error={errorAt("/effort")}
        value={effort}
        texts={EFFORT_TEXTS}
        disabled={own !== undefined}
        onChoose={(value) => onChange(withValue(body, "/effort", value === "balanced" ? undefined : value))}
      />
      <Field label="Algorithms" hint="Names separated by commas, or none." error={errorAt("/config/algo_config")}>
        {(field) => (
          <input
            {...field}
            placeholder={chain || "rounds to nearest"}
            value={text}
            onChange={({ target: { value } }) => {
              setText(value);
              onChange(withAlgorithms(body, value));
            }}
          />
        )}
      </Field>
    </>
  );
}
