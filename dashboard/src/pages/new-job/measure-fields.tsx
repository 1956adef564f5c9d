import { Field } from "../../ui/basics";
import { withValue } from "./body";
import { Names, type Props, Value } from "./fields";
import { TextFields } from "./text-fields";

const GATES: [string, string][] = [
  ["warn", "is a warning"],
  ["fail", "fails the job; the artifact is kept apart"],
  ["off", "is not looked for"],
];

/** How the result is measured beside the original, and what a missed limit means. */
export function MeasureFields(props: Props) {
  const { body, onChange, errorAt } = props;
  const { source, tasks } = body.evaluation ?? {};
  const hasOwnText = source !== undefined;
  return (
    <fieldset>
      <legend>Measurement</legend>
      <Field
        label="A missed limit"
        error={errorAt("/gate")}
        hint="Limits of perplexity, divergence, clipping and more, by scheme."
      >
        {(own) => (
          <select
            {...own}
            value={body.gate ?? "warn"}
            onChange={(event) => onChange(withValue(body, "/gate", event.target.value))}
          >
            {GATES.map(([name, text]) => (
              <option key={name} value={name}>
                {text}
              </option>
            ))}
          </select>
        )}
      </Field>
      <TextFields
        {...props}
        of="evaluation"
        label="Measured on"
        usual="What calibration leaves of its text"
        more={[["builtin", "Built-in prose"]]}
      />
      <div className="fields">
        <Value
          {...props}
          pointer="/evaluation/num_windows"
          label="Windows"
          hint="0: nothing is measured"
          number
          placeholder="12"
        />
        <Value {...props} pointer="/evaluation/seq_len" label="Tokens of a window" number placeholder="512" />
        {hasOwnText && (
          <Value
            {...props}
            pointer="/evaluation/stride"
            label="Stride"
            hint="Less than a window: more context"
            number
            placeholder="a window"
          />
        )}
        {hasOwnText && source !== "builtin" && (
          <Value {...props} pointer="/evaluation/column" label="Its column" placeholder="text, else messages" />
        )}
        <Value
          {...props}
          pointer="/evaluation/num_prompts"
          label="Prompts"
          hint="Texts that both models continue"
          number
          placeholder="4"
        />
        <Names
          {...props}
          pointer="/evaluation/tasks"
          label="Tasks"
          hint="Of lm-evaluation-harness, on both models"
          placeholder="gsm8k, piqa"
        />
        {tasks && (
          <>
            <Value {...props} pointer="/evaluation/limit" label="Documents of a task" number placeholder="all" />
            <Value
              {...props}
              pointer="/evaluation/num_fewshot"
              label="Examples of a task"
              number
              placeholder="the task's own"
            />
            <Value {...props} pointer="/evaluation/batch_size" label="Documents at a time" number placeholder="8" />
          </>
        )}
      </div>
    </fieldset>
  );
}
