import { RECOVERY_TEXTS, RUNTIME_TEXTS } from "../../labels";
import { Field } from "../../ui/basics";
import { type Goal, recoveryOf } from "./body";
import { type Props, Value } from "./fields";

/** The three questions of a goal: where the result will run, how large it may be, and how good it must be. */
export function GoalFields({ goal, ...props }: Props & { goal: Goal }) {
  const { body, onChange, errorAt } = props;
  const set = (change: Partial<Goal>) => onChange({ ...body, goal: { ...goal, ...change } });
  return (
    <>
      {errorAt("/goal") && <p className="error">✕ {errorAt("/goal")}</p>}
      <div className="fields">
        <Field label="Where will it run?" hint="The program that loads the result." error={errorAt("/goal/runtime")}>
          {(own) => (
            <select {...own} value={goal.runtime} onChange={({ target }) => set({ runtime: target.value })}>
              {Object.entries(RUNTIME_TEXTS).map(([name, text]) => (
                <option key={name} value={name}>
                  {text}
                </option>
              ))}
            </select>
          )}
        </Field>
        <Value
          {...props}
          pointer="/goal/device"
          label="Device"
          placeholder="24GB"
          hint="The memory of a GPU, such as 24GB, or a name such as h100, rtx4090, mi300 or cpu."
        />
        <Value
          {...props}
          pointer="/goal/context"
          label="Context"
          number
          placeholder="8192"
          hint="Tokens whose KV cache must fit beside the weights."
        />
        <Value
          {...props}
          pointer="/goal/max_size"
          label="How large may it be?"
          placeholder="what fits the device"
          hint="The size of all weight files, such as 4GB."
        />
        <Field
          label="How good must it be?"
          hint="The share of the original's probability per token that the result must keep."
          error={errorAt("/goal/min_recovery")}
        >
          {(own) => (
            <select
              {...own}
              value={String(goal.min_recovery ?? "")}
              onChange={({ target }) => set({ min_recovery: recoveryOf(target.value) })}
            >
              {Object.entries(RECOVERY_TEXTS).map(([value, text]) => (
                <option key={value} value={value}>
                  {text}
                </option>
              ))}
            </select>
          )}
        </Field>
        <Value
          {...props}
          pointer="/goal/max_time_s"
          label="Time limit (seconds)"
          number
          placeholder="none"
          hint="No candidate is started that would probably end later."
        />
      </div>
    </>
  );
}
