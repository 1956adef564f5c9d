import { useState } from "react";
import { Field } from "../../ui/basics";
import { type Budget, budgetOf, type Mix, withBudget } from "./body";
import { Names, type Props, Value } from "./fields";

const TEXTS: Record<Budget, string> = {
  max_size: "the size of all weights",
  max_bits: "bits a weight",
  max_divergence: "divergence from the original, nats a token",
};

/** Which schemes the layers may have, and for what budget the mix is chosen. */
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
        hint="Presets; keep leaves a layer as it is."
        errorAt={() => places.map(errorAt).find(Boolean)}
      />
      <Field label="Chosen for" error={errorAt("/mix")}>
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
      <Value {...props} key={budget} pointer={`/mix/${budget}`} label="At most" number={budget !== "max_size"} />
    </div>
  );
}
