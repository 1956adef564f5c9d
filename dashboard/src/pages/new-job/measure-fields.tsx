import { COLUMN_PLACEHOLDER, GATE_TEXTS, LABELS } from "../../labels";
import { withValue } from "./body";
import { Choice, Names, type Props, Scoped, Value } from "./fields";
import { TextFields } from "./text-fields";

/** How the quantized model is compared with the original, and what happens when a limit is exceeded. */
export function MeasureFields(props: Props) {
  const { body, onChange, errorAt } = props;
  const { source, tasks, num_behaviour_prompts: hasBehaviour } = body.evaluation ?? {};
  const hasOwnText = source !== undefined;
  return (
    <fieldset>
      <legend>{LABELS.evaluation}</legend>
      <Choice
        label={LABELS.qualityGate}
        hint="What happens when perplexity, divergence or clipping exceeds its limit. A failed job keeps its artifact, marked as rejected."
        error={errorAt("/gate")}
        value={body.gate ?? "warn"}
        texts={GATE_TEXTS}
        onChoose={(gate) => onChange(withValue(body, "/gate", gate))}
      />
      <TextFields
        {...props}
        of="evaluation"
        label="Evaluation text"
        usual="Held-out part of the calibration data"
        more={[["builtin", "Built-in mix"]]}
      />
      <div className="fields">
        <Value
          {...props}
          pointer="/evaluation/num_windows"
          label="Windows"
          hint="0 skips the evaluation"
          number
          placeholder="12"
        />
        <Value
          {...props}
          pointer="/evaluation/seq_len"
          label={<Scoped to="Evaluation">Sequence length</Scoped>}
          number
          placeholder="512"
        />
        {hasOwnText && (
          <Value
            {...props}
            pointer="/evaluation/stride"
            label="Stride"
            hint="Less than the sequence length: more context per token"
            number
            placeholder="sequence length"
          />
        )}
        {hasOwnText && source !== "builtin" && (
          <Value
            {...props}
            pointer="/evaluation/column"
            label={<Scoped to="Evaluation">Text column</Scoped>}
            placeholder={COLUMN_PLACEHOLDER}
          />
        )}
        <Value
          {...props}
          pointer="/evaluation/num_prompts"
          label="Questions"
          hint="How many both models answer; the answers are shown side by side"
          number
          placeholder="4"
        />
        <Value
          {...props}
          pointer="/evaluation/num_behaviour_prompts"
          label="Behaviour prompts"
          hint="How many packaged prompts both chat models really answer, to find loops, missing ends and broken JSON"
          number
          placeholder="0"
        />
        {hasBehaviour && (
          <Value
            {...props}
            pointer="/evaluation/behaviour_len"
            label="Most tokens of an answer"
            number
            placeholder="256"
          />
        )}
        <Names
          {...props}
          pointer="/evaluation/kv_cache_dtypes"
          label="KV caches to measure"
          hint="How llama.cpp or vLLM would keep the KV cache; llama_cpp and vllm name all"
          placeholder="q8_0, fp8"
        />
        <Names
          {...props}
          pointer="/evaluation/tasks"
          label="Tasks"
          hint="Tasks of lm-evaluation-harness, run on both models"
          placeholder="gsm8k, piqa"
        />
        {tasks && (
          <>
            <Value {...props} pointer="/evaluation/limit" label="Documents per task" number placeholder="all" />
            <Value
              {...props}
              pointer="/evaluation/num_fewshot"
              label="Few-shot examples"
              number
              placeholder="task default"
            />
            <Value {...props} pointer="/evaluation/batch_size" label="Batch size" number placeholder="8" />
          </>
        )}
      </div>
    </fieldset>
  );
}
