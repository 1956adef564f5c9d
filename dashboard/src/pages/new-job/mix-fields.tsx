import { useState } from "react";
import { type Budget, budgetOf, type Mix, withBudget } from "./body";
import { Choice, Names, type Props, Value } from "./fields";

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
      <Choice
        label="Budget"
        error={errorAt("/mix")}
        value={budget}
        texts={TEXTS}
        onChoose={(name) => change(name as Budget)}
      />
      <Value {...props} key={budget} pointer={`/mix/${budget}`} label="Maximum" number={budget !== "max_size"} />
    </div>
  );
}
