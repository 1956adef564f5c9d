import { RECOVERY_TEXTS, RUNTIME_TEXTS } from "../../labels";
import { type Goal, recoveryOf } from "./body";
import { Choice, type Props, Value } from "./fields";

/** The three questions of a goal: where the result will run, how large it may be, and how good it must be. */
export function GoalFields({ goal, ...props }: Props & { goal: Goal }) {
  const { body, onChange, errorAt } = props;
  const set = (change: Partial<Goal>) => onChange({ ...body, goal: { ...goal, ...change } });
  return (
    <>
      {errorAt("/goal") && <p className="error">✕ {errorAt("/goal")}</p>}
      <div className="fields">
        <Choice
          label="Where will it run?"
          hint="The program that loads the result."
          error={errorAt("/goal/runtime")}
          value={goal.runtime}
          texts={RUNTIME_TEXTS}
          onChoose={(runtime) => set({ runtime })}
        />
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
        <Choice
          label="How good must it be?"
          hint="The share of the original's probability per token that the result must keep."
          error={errorAt("/goal/min_recovery")}
          value={String(goal.min_recovery ?? "")}
          texts={RECOVERY_TEXTS}
          onChoose={(value) => set({ min_recovery: recoveryOf(value) })}
        />
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
