import { useEffect } from "react";
import { Title } from "../../ui/basics";
import { ChartParts } from "./chart-parts";
import { ContentParts } from "./content-parts";
import { ControlParts } from "./control-parts";
import { FeedbackParts } from "./feedback-parts";

const NAME = "Components";

/** Every component of `src/ui` and `src/charts` in its states, for whoever changes one, and for tests/browser. */
export default function Components() {
  useEffect(() => {
    document.title = `${NAME} · Bitfoundry`; // the titles among the parts have set it, too
  }, []);
  return (
    <>
      <Title>{NAME}</Title>
      <p className="faint">Each component in each of its states. No menu leads here. Choose the theme above.</p>
      <ControlParts />
      <ContentParts />
      <FeedbackParts />
      <ChartParts />
    </>
  );
}
