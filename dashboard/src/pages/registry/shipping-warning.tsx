import type { Verdict } from "../../api/types";
import { VerdictLevel } from "../job-progress";
import { toneOf } from "../run/verdict";

/** Says the verdict on a result that may not be shipped as it is. Nothing for one that is faithful or good. */
export function ShippingWarning({ level, sentence }: { level?: string | null; sentence?: Verdict["sentence"] }) {
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
