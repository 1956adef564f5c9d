import type { Summary, Verdict } from "../../api/types";
import { VerdictLevel } from "../job-progress";
import { toneOf } from "../run/verdict";

interface Judged {
  level?: string | null;
  sentence?: Verdict["sentence"];
  goal?: Summary["goal"];
}

/** Says why a result may not be shipped as it is: its verdict, or a missed goal. Nothing for one that may. */
export function ShippingWarning({ level, sentence, goal }: Judged) {
  return (
    <>
      <VerdictWarning level={level} sentence={sentence} />
      {goal && !goal.is_met && <p className="notice warn">This result missed its goal: {goal.why}.</p>}
    </>
  );
}

function VerdictWarning({ level, sentence }: Judged) {
  if (!level) {
    return <p className="notice warn">This result has no verdict: how close it is to the original was not judged.</p>;
  }
  const tone = toneOf(level);
  if (tone === "good") return null;
  return (
    <p className={`notice ${tone}`}>
      This result is <VerdictLevel level={level} />. {sentence}
    </p>
  );
}
