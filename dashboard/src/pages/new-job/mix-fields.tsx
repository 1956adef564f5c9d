import { useState } from "react";
import { Field } from "../../ui/basics";
import { type Budget, budgetOf, type Mix, withBudget } from "./body";
import { Names, type Props, Value } from "./fields";

const TEXTS: Record<Budget, string> = {
  max_size: "Total size of the weights",
  max_bits: "Average bits per weight",
  max_divergence: "KL divergence (nats per token)",
};

/** The schemes that the layers may have, and the budget that limits the choice. */
export function MixFields({ mix, ...props }: Props & { mix: Mix }) {
  const [budget, setBudget] = useState<Budget>(budgetOf(mix) ?? "max_bits");
  const { body, onChange, errorAt } = props;
  const places = ["/mix/schemes", ...mix.schemes.map((_, index) => `/mix/schemes/${index}`)];
  const change = (name: Budget) => {
    setBudget(name);
    onChange({ ...body, mix: withBudget(mix, name) });
  };
  return (
    <div className="fields">
      <Names
        {...props}
        pointer="/mix/schemes"
        label="Schemes"
        hint="Presets to choose from; keep leaves a layer unquantized."
        errorAt={() => places.map(errorAt).find(Boolean)}
      />
      <Field label="Budget" error={errorAt("/mix")}>
        {(own) => (
          <select {...own} value={budget} onChange={(event) => change(event.target.value as Budget)}>
            {Object.entries(TEXTS).map(([name, text]) => (
              <option key={name} value={name}>
                {text}
              </option>
            ))}
          </select>
        )}
      </Field>
      <Value {...props} key={budget} pointer={`/mix/${budget}`} label="Maximum" number={budget !== "max_size"} />
    </div>
  );
}
